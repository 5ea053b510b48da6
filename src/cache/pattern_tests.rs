use proptest::prelude::*;

use super::super::term::tests::any_term;
use super::*;
use crate::record;

fn compiled(fields: Vec<Pattern>) -> RecordPattern {
    RecordPattern::new(fields).unwrap()
}

fn ints(numbers: &[i64]) -> Option<Vec<Term>> {
    Some(numbers.iter().map(|n| Term::from(*n)).collect())
}

fn map<K: Into<Term>, V: Into<Pattern>>(pairs: impl IntoIterator<Item = (K, V)>) -> Pattern {
    Pattern::Map(pairs.into_iter().map(|(key, value)| (key.into(), value.into())).collect())
}

// caught by: bindings in the order of their places; in the order of the text of the numbers (10 before 2)
#[test]
fn bindings_come_in_the_numeric_order_of_variables() {
    let pattern = compiled(pattern![var(10), var(2), _, var(1)]);
    assert_eq!(pattern.variables(), [1, 2, 10]);
    assert_eq!(pattern.bindings(&record![100, 20, 0, 3]), ints(&[3, 20, 100]));
}

// caught by: a variable that takes its last value; one that is bound twice
#[test]
fn a_repeated_variable_fits_equal_values_only_and_is_bound_once() {
    let pattern = compiled(pattern![var(1), ("x", var(1)), [var(1), var(0)]]);
    assert_eq!(pattern.bindings(&record![1, ("x", 1), [1, 2]]), ints(&[2, 1]));
    assert_eq!(pattern.bindings(&record![1, ("x", 1), [2, 2]]), None);
    assert_eq!(pattern.bindings(&record![1, ("x", 1.0), [1, 2]]), None, "1 is not 1.0");
    assert!(pattern.fits(&record![0.0, ("x", -0.0), [Term::from(0.0), 2.into()]]));
}

#[test]
fn variables_and_wildcards_stand_inside_tuples_lists_and_maps() {
    let map_term = |x: i64| Term::from(BTreeMap::from([("x", x), ("y", 2)]));
    let pattern = compiled(pattern!["k", (var(3), [Pattern::Any, map([("x", var(1))])])]);
    let record = |x| record!["k", (7, [Term::Nil, map_term(x)])];
    assert_eq!(pattern.bindings(&record(5)), ints(&[5, 7]));
    assert_eq!(pattern.bindings(&record!["k", (7, [map_term(5), Term::Nil])]), None);
    assert_eq!(pattern.bindings(&record!["k", [Term::from(7), vec![Term::Nil, map_term(5)].into()]]), None);
    // a map fits with more keys than are named, an exact map does not
    assert!(compiled(pattern![map([("x", 5)])]).fits(&record![map_term(5)]));
    assert!(!compiled(pattern![map([("z", Pattern::Any)])]).fits(&record![map_term(5)]));
    assert!(!compiled(pattern![Term::from(BTreeMap::from([("x", 5)]))]).fits(&record![map_term(5)]));
    // lists and tuples fit whole
    assert!(!compiled(pattern![[var(1)]]).fits(&record![[1, 2]]));
    assert!(!compiled(pattern![(var(1),)]).fits(&record![[1]]));
}

#[test]
fn records_of_another_arity_do_not_fit() {
    let pattern = compiled(pattern![_, _]);
    assert!(pattern.fits(&record![1, 2]));
    assert!(!pattern.fits(&record![1]) && !pattern.fits(&record![1, 2, 3]));
    let short = pattern.reaches(2, "partition_field").unwrap_err();
    assert_eq!(
        short.to_string(),
        "the pattern has 2 fields; it must reach field 2, the partition_field, counted from 0"
    );
    let other = PatternError::Arity { given: 2, held: vec![3, 4] };
    assert_eq!(other.to_string(), "the pattern has 2 fields; the records have 3 or 4");
}

#[test]
fn size_and_depth_are_bounded_when_made_and_when_read() {
    let refused = |fields: Vec<Pattern>| {
        let mut bytes = Vec::new();
        write_all(TUPLE, &fields, &mut bytes);
        let made = RecordPattern::new(fields).unwrap_err();
        assert_eq!(RecordPattern::decode(&bytes).unwrap_err(), made);
        made
    };
    let parts = |n: usize| vec![Pattern::Any; n];
    assert_eq!(compiled(parts(MAX_PATTERN_PARTS)).arity(), MAX_PATTERN_PARTS);
    assert_eq!(refused(parts(MAX_PATTERN_PARTS + 1)), PatternError::TooLarge { max: MAX_PATTERN_PARTS });
    let variables = |n: u16| (0..n).map(var).collect::<Vec<_>>();
    assert_eq!(compiled(variables(256)).variables().len(), MAX_PATTERN_VARIABLES);
    assert_eq!(refused(variables(257)), PatternError::TooManyVariables { given: 257, max: 256 });
    let nest = |levels| (0..levels).fold(var(1), |inner, _| Pattern::List(vec![inner]));
    compiled(vec![nest(MAX_TERM_DEPTH - 1)]);
    let deep = PatternError::Term(TermError::TooDeep { max: MAX_TERM_DEPTH });
    assert_eq!(refused(vec![nest(MAX_TERM_DEPTH)]), deep);
    assert_eq!(RecordPattern::decode(&[LIST, 1].repeat(1 << 20)).unwrap_err(), deep);
    assert_eq!(
        RecordPattern::new(pattern![("x", f64::NAN)]).unwrap_err(),
        PatternError::Term(TermError::NotANumber)
    );
    // an exact term below a pattern has only the levels that are left
    let mixed =
        Pattern::List(vec![(0..MAX_TERM_DEPTH - 1).fold(Term::Nil, |t, _| Term::List(vec![t])).into()]);
    assert_eq!(refused(vec![mixed]), deep);
}

#[test]
fn malformed_bytes_are_refused() {
    for bytes in [
        &[][..],
        &[ANY],
        &[TUPLE],
        &[TUPLE, 2, ANY],
        &[TUPLE, 1, ANY, ANY],
        &[TUPLE, 1, 0x15],
        &[TUPLE, 1, VAR, 0x80, 0x80, 4],
        &[TUPLE, 1, MAP, 2, 2, ANY, 1, ANY],
        &[8, 0],
    ] {
        assert!(matches!(RecordPattern::decode(bytes), Err(PatternError::Term(_))), "{bytes:?}");
    }
}

#[test]
fn a_field_without_choice_is_known() {
    let pattern = compiled(pattern![("a", [1]), var(1), ("a", var(2)), _]);
    assert_eq!(pattern.exact(0), Some(Term::from(("a", [1]))));
    assert_eq!([1, 2, 3, 4].map(|field| pattern.exact(field)), [None, None, None, None]);
}

/// A change here is a change of the wire.
#[test]
fn golden_encoding() {
    let pattern = compiled(pattern![_, var(300), "a", (1, [var(0)]), map([(Term::Nil, Pattern::Any)])]);
    let hex: String = pattern.encode().iter().map(|b| format!("{b:02x}")).collect();
    assert_eq!(hex, "13051011ac02050161130203021201110014010010");
}

fn any_pattern() -> impl Strategy<Value = Pattern> {
    let leaf = prop_oneof![Just(Pattern::Any), (0..4u16).prop_map(var), any_term().prop_map(Pattern::Exact)];
    leaf.prop_recursive(3, 12, 3, |inner| {
        let items = proptest::collection::vec(inner.clone(), 0..3);
        prop_oneof![
            items.clone().prop_map(Pattern::List),
            items.prop_map(Pattern::Tuple),
            proptest::collection::btree_map(any_term(), inner, 0..3).prop_map(Pattern::Map),
        ]
    })
}

/// A pattern that fits the term by construction: parts of it become wildcards or a variable of their own.
fn blur(term: &Term, choices: &mut impl Iterator<Item = u8>, next: &mut u16) -> Pattern {
    match (choices.next().unwrap_or(3), term) {
        (0, _) => Pattern::Any,
        (1, _) => {
            *next += 1;
            var(*next)
        }
        (2, _) => Pattern::Exact(term.clone()),
        (_, Term::List(items)) => Pattern::List(items.iter().map(|t| blur(t, choices, next)).collect()),
        (_, Term::Tuple(items)) => Pattern::Tuple(items.iter().map(|t| blur(t, choices, next)).collect()),
        (_, Term::Map(map)) => {
            Pattern::Map(map.iter().map(|(k, v)| (k.clone(), blur(v, choices, next))).collect())
        }
        _ => Pattern::Exact(term.clone()),
    }
}

/// Puts the bindings into the pattern: what comes out fits the record as an exact term, but for wildcards and maps.
fn filled(pattern: &Pattern, values: &BTreeMap<u16, Term>) -> Pattern {
    let all = |inner: &[Pattern]| inner.iter().map(|p| filled(p, values)).collect();
    match pattern {
        Pattern::Var(number) => Pattern::Exact(values[number].clone()),
        Pattern::List(inner) => Pattern::List(all(inner)),
        Pattern::Tuple(inner) => Pattern::Tuple(all(inner)),
        Pattern::Map(inner) => {
            Pattern::Map(inner.iter().map(|(k, p)| (k.clone(), filled(p, values))).collect())
        }
        Pattern::Any | Pattern::Exact(_) => pattern.clone(),
    }
}

proptest! {
    #[test]
    fn what_is_written_is_read(fields in proptest::collection::vec(any_pattern(), 0..4)) {
        let pattern = compiled(fields);
        prop_assert_eq!(&RecordPattern::decode(&pattern.encode()).unwrap(), &pattern);
        let bytes = postcard::to_stdvec(&pattern).unwrap();
        prop_assert_eq!(&postcard::from_bytes::<RecordPattern>(&bytes).unwrap(), &pattern);
    }

    #[test]
    fn a_blurred_record_fits_and_its_bindings_fill_the_pattern(
        fields in proptest::collection::vec(any_term(), 1..4),
        choices in proptest::collection::vec(0..5u8, 0..12),
    ) {
        let record = Record::new(fields);
        let (mut choices, mut next) = (choices.into_iter(), 0);
        let pattern = compiled(record.fields().iter().map(|t| blur(t, &mut choices, &mut next)).collect());
        let bindings = pattern.bindings(&record).unwrap();
        prop_assert_eq!(bindings.len(), usize::from(next));
        let values = pattern.variables().iter().copied().zip(bindings).collect();
        let exact = compiled(pattern.fields().iter().map(|p| filled(p, &values)).collect());
        prop_assert!(exact.fits(&record));
    }
}
