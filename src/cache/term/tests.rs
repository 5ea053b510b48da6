use std::collections::{BTreeMap, HashSet};

use proptest::prelude::*;
use serde::Deserialize;

use super::*;
use crate::record;

fn map(pairs: &[(Term, Term)]) -> Term {
    Term::Map(pairs.iter().cloned().collect())
}

/// One of each kind and each length of varint, in rising order.
fn samples() -> Vec<Term> {
    vec![
        Term::Nil,
        false.into(),
        true.into(),
        i64::MIN.into(),
        (-1).into(),
        0.into(),
        1.into(),
        64.into(),
        i64::MAX.into(),
        f64::NEG_INFINITY.into(),
        (-1.5).into(),
        0.0.into(),
        1.0.into(),
        f64::INFINITY.into(),
        "".into(),
        "a".into(),
        "aa".into(),
        "b".into(),
        "é".into(),
        Bytes::from_static(b"").into(),
        Bytes::from_static(b"\x00\xff").into(),
        Term::List(vec![]),
        vec![1].into(),
        vec![1, 2].into(),
        vec![2].into(),
        Term::Tuple(vec![]),
        (1, "x").into(),
        (1, "x", Term::Nil).into(),
        map(&[]),
        map(&[(1.into(), 1.into())]),
        map(&[(1.into(), 2.into()), (1.0.into(), 1.into())]),
        map(&[("k".into(), vec![(true, 0.5)].into())]),
    ]
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// A change here moves keys to other partitions and breaks nodes of two releases: never change a line.
const GOLDEN: &[(&str, u64)] = &[
    ("00", 0xc44b_dff4_074e_ecdb),
    ("01", 0xe12e_f9d2_eb86_ceeb),
    ("02", 0xc9f4_2e6c_9e93_dfff),
    ("03ffffffffffffffffff01", 0x1638_37bf_1a7c_600f),
    ("0301", 0xe065_b0bf_df57_b3d5),
    ("0300", 0x7462_ed7b_2cc0_8f56),
    ("0302", 0x0b97_ce6c_d0a0_64b2),
    ("038001", 0xb54f_1f29_910f_ba8e),
    ("03feffffffffffffffff01", 0x6bdd_c90e_d528_c396),
    ("04fff0000000000000", 0x95da_844b_65e2_0863),
    ("04bff8000000000000", 0xdb0f_7eaf_e963_7e94),
    ("040000000000000000", 0xee53_fd1b_240e_9dc6),
    ("043ff0000000000000", 0x67f7_7597_3940_c76d),
    ("047ff0000000000000", 0x699b_d904_f42d_6c83),
    ("0500", 0x240b_7f68_adee_822c),
    ("050161", 0x7b65_79f5_4710_9c07),
    ("05026161", 0xd6cc_6629_64c1_3827),
    ("050162", 0x7297_ec73_7122_2ff6),
    ("0502c3a9", 0x1788_46ef_8a80_5536),
    ("0600", 0x548e_68bd_e3d2_215a),
    ("060200ff", 0x04a7_e458_5e13_5832),
    ("0700", 0xf632_74ea_eedf_0eec),
    ("07010302", 0xccc2_2dd9_09b3_5ee7),
    ("070203020304", 0x9cbc_553b_60f4_9bc6),
    ("07010304", 0x564c_71f7_a19d_1e57),
    ("0800", 0xc29b_545f_9901_e49b),
    ("08020302050178", 0x0b4a_0c22_ce6c_586e),
    ("0803030205017800", 0x180c_0fd8_4d7f_be3f),
    ("0900", 0xdd8c_f11f_9e6b_6c63),
    ("090103020302", 0xd324_a005_3658_3133),
    ("090203020304043ff00000000000000302", 0xbe23_8d47_f0c4_3a7e),
    ("090105016b0701080202043fe0000000000000", 0x3679_4346_a494_8064),
];

#[test]
fn golden_encodings_and_hashes() {
    let terms = samples();
    let found: Vec<(String, u64)> =
        terms.iter().map(|t| (hex(&t.encode().unwrap()), t.stable_hash())).collect();
    let wanted: Vec<_> = GOLDEN.iter().map(|(hex, hash)| (hex.to_string(), *hash)).collect();
    assert_eq!(found, wanted);
    assert_eq!(record!["user", 7].stable_hash(), 0xa513_5f45_2c9b_2e77);
}

// caught by: an order that compares numbers across kinds; one that takes tuples by length first
#[test]
fn the_samples_rise() {
    let terms = samples();
    for (i, a) in terms.iter().enumerate() {
        for (j, b) in terms.iter().enumerate() {
            assert_eq!(a.cmp(b), i.cmp(&j), "{a} and {b}");
        }
    }
}

#[test]
fn one_and_one_point_zero_differ_and_zeros_are_one() {
    assert_ne!(Term::from(1), Term::from(1.0));
    assert_ne!(Term::from(1).stable_hash(), Term::from(1.0).stable_hash());
    let (minus, plus) = (Term::Float(-0.0), Term::Float(0.0));
    assert_eq!(minus, plus);
    assert_eq!(minus.stable_hash(), plus.stable_hash());
    assert_eq!(minus.encode(), plus.encode());
    assert!(!to_term(&-0.0f64).unwrap().to_string().contains('-'));
}

#[test]
fn nan_is_refused_wherever_it_is() {
    assert_eq!(to_term(&f64::NAN), Err(TermError::NotANumber));
    assert_eq!(to_term(&[Some(f32::NAN)]), Err(TermError::NotANumber));
    let nested = Term::from(vec![(1, f64::NAN)]);
    assert_eq!(nested.check(), Err(TermError::NotANumber));
    assert_eq!(map(&[(f64::NAN.into(), 1.into())]).encode(), Err(TermError::NotANumber));
    assert_eq!(record!["k", f64::NAN].check(), Err(TermError::NotANumber));
    assert_eq!(Term::decode(&hex_bytes("047ff8000000000000")), Err(TermError::NotANumber));
    // the order stays total all the same
    let nan = Term::Float(-f64::NAN);
    assert_eq!(nan, Term::Float(f64::NAN));
    assert!(nan > Term::from(f64::INFINITY) && nan < Term::from(""));
}

fn hex_bytes(text: &str) -> Vec<u8> {
    text.as_bytes()
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

#[test]
fn only_the_one_encoding_is_read() {
    use TermError::Truncated;
    for (text, error) in [
        ("", Truncated),
        ("03", Truncated),
        ("0380", Truncated),
        ("0400", Truncated),
        ("0502", Truncated),
        ("0701", Truncated),
        ("07ffffffffffffffffff01", Truncated),
        ("0902010202", Truncated),
        ("038000", TermError::malformed("a number is padded")),
        ("03ffffffffffffffffff02", TermError::malformed("a number is too long")),
        ("03ffffffffffffffffffff", TermError::malformed("a number is too long")),
        ("0000", TermError::malformed("bytes follow it")),
        ("0a", TermError::malformed("unknown kind")),
        ("0501ff", TermError::malformed("a string is no UTF-8")),
        ("048000000000000000", TermError::malformed("-0.0 is written as 0.0")),
        ("090201000100", TermError::malformed("the keys of a map do not rise")),
        ("090202000100", TermError::malformed("the keys of a map do not rise")),
    ] {
        assert_eq!(Term::decode(&hex_bytes(text)), Err(error), "{text}");
    }
    assert_eq!(
        Record::decode(&hex_bytes("0700")),
        Err(TermError::NotARecord { given: "list".into() }),
        "a list is no record"
    );
}

fn nest(levels: usize) -> Term {
    (0..levels).fold(Term::Nil, |term, level| match level % 3 {
        0 => Term::List(vec![term]),
        1 => Term::Tuple(vec![1.into(), term]),
        _ => map(&[(term, Term::Nil)]),
    })
}

#[test]
fn depth_is_bounded_everywhere() {
    let deep = TermError::TooDeep { max: MAX_TERM_DEPTH };
    let allowed = nest(MAX_TERM_DEPTH);
    assert_eq!(Term::decode(&allowed.encode().unwrap()), Ok(allowed.clone()));
    let too_deep = nest(MAX_TERM_DEPTH + 1);
    assert_eq!(too_deep.check(), Err(deep.clone()));
    assert_eq!(too_deep.encode(), Err(deep.clone()));
    assert_eq!(Record::new([allowed]).check(), Err(deep.clone()), "a record is a level");
    assert_eq!(Record::new([nest(MAX_TERM_DEPTH - 1)]).check(), Ok(()));
    let mut bytes = Vec::new();
    write_term(&too_deep, &mut bytes);
    assert_eq!(Term::decode(&bytes), Err(deep.clone()));
    assert_eq!(Term::decode(&[7, 1].repeat(1 << 20)), Err(deep));
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Chain(Option<Box<Chain>>);

#[test]
fn a_type_without_end_ends() {
    let long = (0..1000).fold(Chain(None), |chain, _| Chain(Some(Box::new(chain))));
    let deep = TermError::TooDeep { max: MAX_TERM_DEPTH };
    assert_eq!(to_term(&long), Err(deep.clone()));
    // what is no nil is `Some` of the same type, again and again
    assert_eq!(from_term::<Chain>(&Term::from(1)), Err(deep));
    let short = Chain(Some(Box::new(Chain(None))));
    assert_eq!(from_term::<Chain>(&to_term(&short).unwrap()), Ok(short));
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
enum Light {
    Off,
    Dim(u8),
    Rgb(u8, i16, f32),
    Hsv { h: i64, s: Option<()> },
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Unit;

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Wrapper(String);

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Everything {
    none: Option<u8>,
    some: Option<Option<u8>>,
    unit: (Unit, ()),
    wide: (i128, u128, u64),
    char: char,
    bytes: Bytes,
    list: Vec<Light>,
    map: BTreeMap<(u8, bool), Wrapper>,
    term: Term,
    record: Record,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    skipped: Option<u8>,
}

fn everything() -> Everything {
    Everything {
        none: None,
        some: Some(None),
        unit: (Unit, ()),
        wide: (i64::MIN.into(), 1, i64::MAX as u64),
        char: 'ß',
        bytes: Bytes::from_static(b"\x00"),
        list: vec![Light::Off, Light::Dim(3), Light::Rgb(1, -2, 0.5), Light::Hsv { h: 1, s: Some(()) }],
        map: [((1, true), Wrapper("w".into()))].into(),
        term: Term::from((1, 2)),
        record: record![1, vec!["a"]],
        skipped: None,
    }
}

#[test]
fn the_data_model_of_serde_goes_there_and_back() {
    let value = everything();
    let term = to_term(&value).unwrap();
    let field = |name: &str| match &term {
        Term::Map(map) => map[&Term::from(name)].clone(),
        _ => panic!("a struct is a map"),
    };
    assert_eq!(field("some").to_string(), "(nil,)", "Some(None) is not None");
    assert_eq!(
        field("list").to_string(),
        r#"[("Off",), ("Dim", 3), ("Rgb", 1, -2, 0.5), ("Hsv", {"h": 1, "s": (nil,)})]"#
    );
    assert_eq!(field("term"), Term::from((1, 2)), "a term is itself");
    assert_eq!(field("record"), Term::from((1, vec!["a"])));
    assert_eq!(from_term::<Everything>(&term), Ok(value));
    // and so do terms through other formats
    let bytes = postcard::to_stdvec(&term).unwrap();
    assert_eq!(postcard::from_bytes::<Term>(&bytes).unwrap(), term);
    let text = serde_json::to_string(&everything().record).unwrap();
    assert_eq!(serde_json::from_str::<Record>(&text).unwrap(), everything().record);
}

#[test]
fn options_in_options_keep_their_levels() {
    type Deep = Option<Option<Option<(Option<u8>,)>>>;
    let all: [Deep; 5] =
        [None, Some(None), Some(Some(None)), Some(Some(Some((None,)))), Some(Some(Some((Some(1),))))];
    let terms: Vec<Term> = all.iter().map(|value| to_term(value).unwrap()).collect();
    assert_eq!(terms.iter().map(Term::stable_hash).collect::<HashSet<_>>().len(), all.len(), "{terms:?}");
    for (value, term) in all.iter().zip(&terms) {
        assert_eq!(from_term::<Deep>(term).as_ref(), Ok(value));
    }
    assert_eq!(Term::from(Some(())), to_term(&Some(())).unwrap());
}

#[test]
fn what_does_not_fit_is_an_error_that_says_so() {
    let big = TermError::IntOutOfRange { given: "9223372036854775808".into() };
    assert_eq!(to_term(&(i64::MAX as u64 + 1)), Err(big.clone()));
    assert!(to_term(&vec![Some(u64::MAX)]).unwrap_err().to_string().contains("18446744073709551615"));
    assert_eq!(to_term(&i128::from(i64::MIN)).unwrap(), Term::from(i64::MIN));
    assert!(to_term(&(i128::from(i64::MIN) - 1)).is_err());
    assert_eq!(
        big.to_string(),
        "the number 9223372036854775808 is no term; -9223372036854775808 to 9223372036854775807 are"
    );
    // reading
    assert!(from_term::<u8>(&Term::from(256)).is_err());
    assert!(from_term::<u64>(&Term::from(-1)).is_err());
    assert!(from_term::<(u8, u8)>(&Term::from((1, 2, 3))).is_err(), "an item more");
    assert!(from_term::<(u8, u8)>(&Term::from((1,))).is_err(), "an item less");
    assert!(from_term::<Light>(&Term::from("Off")).is_err());
    assert!(from_term::<Light>(&Term::from(("Dim",))).is_err());
    assert!(from_term::<Light>(&Term::from(("Off", 1))).is_err());
    assert!(from_term::<Light>(&Term::from(("Rgb", 1, 2, 0.5, 3))).is_err());
    assert!(from_term::<Light>(&Term::from(("Dark",))).unwrap_err().to_string().contains("Dark"));
    assert_eq!(from_term::<Vec<u8>>(&Term::from(b"ab".as_slice())), Ok(vec![97, 98]));
}

#[test]
fn a_record_is_read_into_a_struct_by_position() {
    #[derive(Debug, PartialEq, Deserialize)]
    struct User<'a> {
        name: &'a str,
        age: u8,
    }
    let term = record!["Ada", 36].to_term();
    assert_eq!(from_term::<User<'_>>(&term), Ok(User { name: "Ada", age: 36 }));
}

#[test]
fn a_key_twice_is_no_map() {
    struct Twice;
    impl Serialize for Twice {
        fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            serializer.collect_map([(1, "a"), (1, "b")])
        }
    }
    assert_eq!(to_term(&Twice), Err(TermError::DuplicateKey { key: "1".into() }));
}

pub(in crate::cache) fn any_term() -> impl Strategy<Value = Term> {
    let leaf = prop_oneof![
        Just(Term::Nil),
        any::<bool>().prop_map(Term::from),
        prop_oneof![any::<i64>(), -2..3i64].prop_map(Term::from),
        prop_oneof![any::<f64>(), Just(1.0), Just(-0.0)]
            .prop_filter("a number", |f| !f.is_nan())
            .prop_map(Term::Float),
        "[a-c]{0,2}".prop_map(Term::from),
        proptest::collection::vec(any::<u8>(), 0..4).prop_map(|b| Term::Bytes(b.into())),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        let items = proptest::collection::vec(inner.clone(), 0..4);
        prop_oneof![
            items.clone().prop_map(Term::List),
            items.prop_map(Term::Tuple),
            proptest::collection::btree_map(inner.clone(), inner, 0..3).prop_map(Term::Map),
        ]
    })
}

proptest! {
    // caught by: an encoding that leaves the sign of zero in; a hash over the Debug text
    #[test]
    fn equal_exactly_if_encoded_equally(a in any_term(), b in any_term()) {
        let (code_a, code_b) = (a.encode().unwrap(), b.encode().unwrap());
        prop_assert_eq!(a == b, code_a == code_b);
        prop_assert_eq!(a == b, a.cmp(&b) == Ordering::Equal);
        prop_assert_eq!(a.cmp(&b), b.cmp(&a).reverse());
        if a == b {
            prop_assert_eq!(a.stable_hash(), b.stable_hash());
        }
    }

    #[test]
    fn the_order_is_transitive(mut terms in proptest::collection::vec(any_term(), 3)) {
        terms.sort();
        prop_assert!(terms[0] <= terms[1] && terms[1] <= terms[2] && terms[0] <= terms[2]);
    }

    #[test]
    fn what_is_written_is_read(term in any_term()) {
        let bytes = term.encode().unwrap();
        prop_assert_eq!(bytes.len(), term.encoded_len());
        prop_assert_eq!(&Term::decode(&bytes).unwrap(), &term);
        prop_assert_eq!(&to_term(&term).unwrap(), &term);
        prop_assert_eq!(&from_term::<Term>(&term).unwrap(), &term);
    }

    #[test]
    fn what_is_read_is_written_the_same(bytes in proptest::collection::vec(0u8..12, 0..24)) {
        if let Ok(term) = Term::decode(&bytes) {
            prop_assert_eq!(term.encode().unwrap(), bytes);
        }
    }
}
