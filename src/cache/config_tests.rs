use super::*;
use crate::cache::var;
use crate::types::{Incarnation, NodeId};
use crate::{pattern, record};

fn refused(config: &CacheConfig) -> String {
    config.validate().expect_err("it should be refused").to_string()
}

/// The last value that is allowed on each side, and the first that is not.
macro_rules! bounds {
    ($($field:ident: $low:expr, $below:expr, $high:expr, $above:expr $(, with $($with:ident = $value:expr),*)?;)*) => {
        $(
            #[test]
            fn $field() {
                let base = CacheConfig::default()$($(.$with($value))*)?;
                for allowed in [$low, $high] {
                    assert_eq!(base.clone().$field(allowed).validate(), Ok(()));
                }
                for not_allowed in [$below, $above] {
                    let error = base.clone().$field(not_allowed).validate().expect_err("refused");
                    assert_eq!(error.option(), stringify!($field));
                    let text = error.to_string();
                    assert!(text.contains(&format!("{not_allowed:?}")), "{text}");
                }
            }
        )*
    };
}

mod bounds {
    use super::*;
    const SECOND: Duration = Duration::from_secs(1);
    const MILLISECOND: Duration = Duration::from_millis(1);
    const NANOSECOND: Duration = Duration::from_nanos(1);
    const WEEK: Duration = Duration::from_secs(7 * 86_400);
    bounds! {
        partitions: 1, 0, 65_536, 65_537;
        replicas: 1, 0, 16, 17;
        min_copies: 1, 0, 2, 17;
        tombstone_ttl: SECOND, SECOND - NANOSECOND, WEEK, WEEK + NANOSECOND;
        transfer_rate: 65_536, 65_535, 1 << 40, (1 << 40) + 1;
        operation_timeout: MILLISECOND, MILLISECOND - NANOSECOND, SECOND * 600, SECOND * 600 + NANOSECOND;
        max_record_len: 16, 15, 64 << 20, (64 << 20) + 1, with max_log_bytes = 1 << 30;
        max_batch_records: 1, 0, 1 << 20, (1 << 20) + 1;
        max_partition_bytes: 16, 15, 1 << 40, (1 << 40) + 1, with max_record_len = 16;
        max_log_bytes: 16, 15, 1 << 30, (1 << 30) + 1, with max_record_len = 16;
        chunk_bytes: 1024, 1023, 16 << 20, (16 << 20) + 1;
        max_pending: 1, 0, 1 << 20, (1 << 20) + 1;
    }
}

#[test]
fn fields_arity_and_nodes() {
    let config = CacheConfig::default;
    assert_eq!(config().key_field(1023).partition_field(1023).validate(), Ok(()));
    assert_eq!(refused(&config().key_field(1024)), "option key_field is 1024; 0 to 1023 is allowed");
    assert_eq!(
        refused(&config().partition_field(1024)),
        "option partition_field is 1024; 0 to 1023 is allowed"
    );
    assert_eq!(refused(&config().arity(Some(0))), "option arity is 0; 1 to 1024 is allowed");
    assert_eq!(config().arity(Some(3)).key_field(2).partition_field(1).validate(), Ok(()));
    for (config, words) in [
        (config().arity(Some(2)).key_field(2), "key_field is 2 and arity - 1 is 1"),
        (config().arity(Some(2)).partition_field(2), "partition_field is 2 and arity - 1 is 1"),
        (config().min_copies(3), "min_copies is 3 and replicas is 2"),
        (config().expected_nodes(Some(1)), "replicas is 2 and expected_nodes is 1"),
        (config().max_log_bytes(1 << 19), "max_record_len is 1048576 and max_log_bytes is 524288"),
        (
            config().max_partition_bytes(1 << 19),
            "max_record_len is 1048576 and max_partition_bytes is 524288",
        ),
    ] {
        let text = refused(&config);
        assert!(text.contains(words), "{text}");
    }
    assert_eq!(
        refused(&config().expected_nodes(Some(0))),
        "option expected_nodes is 0; 1 to 1024 is allowed"
    );
    assert_eq!(config().expected_nodes(Some(2)).validate(), Ok(()));
}

#[test]
fn names() {
    assert_eq!(CacheConfig::new("x".repeat(255)).validate(), Ok(()));
    assert_eq!(refused(&CacheConfig::new("")), "option name is 0 bytes long; 1 to 255 bytes is allowed");
    assert_eq!(
        refused(&CacheConfig::new("é".repeat(128))),
        "option name is 256 bytes long; 1 to 255 bytes is allowed"
    );
    assert_eq!(
        refused(&CacheConfig::new("a\0b")),
        r#"option name is "a\0b"; text without a zero byte is allowed"#
    );
}

#[test]
fn an_unknown_mode_is_refused_with_the_known_ones() {
    assert_eq!("duplicate_bag".parse(), Ok(Table::DuplicateBag));
    assert_eq!(
        "fast".parse::<WriteMode>().unwrap_err().to_string(),
        r#"option write_mode is "fast"; one of async, sync, strong is allowed"#
    );
    assert!("Local".parse::<ReadMode>().unwrap_err().to_string().contains("local, primary, quorum"));
    let file = serde_json::from_str::<CacheConfig>(r#"{"read_mode": "nearest"}"#).unwrap_err().to_string();
    assert!(file.contains("nearest") && file.contains("quorum"), "{file}");
    assert!(serde_json::from_str::<CacheConfig>(r#"{"replica": 2}"#).is_err(), "an unknown option");
}

#[test]
fn strong_needs_its_feature() {
    let strong = CacheConfig::default().write_mode(WriteMode::Strong);
    assert_eq!(strong.clone().expected_nodes(Some(3)).validate().is_ok(), cfg!(feature = "consensus"));
    // one side of a split must not take itself for a new cluster, and the consensus bears what the data bears
    if cfg!(feature = "consensus") {
        let error = |config: CacheConfig| config.validate().unwrap_err().to_string();
        assert_eq!(
            error(strong.clone()),
            "option expected_nodes is none; 3 to 1024 with write_mode strong is allowed"
        );
        assert!(error(strong.clone().replicas(3).expected_nodes(Some(4))).contains("2 * replicas - 1"));
        assert!(strong.replicas(3).expected_nodes(Some(5)).validate().is_ok());
    }
}

#[test]
fn a_file_gives_what_it_names_and_defaults_for_the_rest() {
    let config: CacheConfig =
        serde_json::from_str(r#"{"name": "s", "table": "bag", "tombstone_ttl": "1h", "arity": 3}"#).unwrap();
    let wanted =
        CacheConfig::new("s").table(Table::Bag).tombstone_ttl(Duration::from_secs(3600)).arity(Some(3));
    assert_eq!(config, wanted);
    let text = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<CacheConfig>(&text).unwrap(), config);
    assert_eq!(CacheConfig::default().validate(), Ok(()));
    assert_eq!([1, 2, 3, 4, 5].map(|n| CacheConfig::default().replicas(n).majority()), [1, 2, 2, 3, 3]);
}

#[test]
fn a_record_is_checked_before_it_is_kept() {
    let config = CacheConfig::default().key_field(1).partition_field(2).max_record_len(16);
    assert_eq!(config.check_record(&record![1, 2, 3]), Ok(()));
    let text = |record: Record| config.check_record(&record).unwrap_err().to_string();
    assert!(text(record![1, 2]).ends_with("has 2 fields, and field 2 is its partition_field"));
    let swapped = config.clone().key_field(2).partition_field(1);
    assert!(
        swapped.check_record(&record![1, 2]).unwrap_err().to_string().ends_with("field 2 is its key_field")
    );
    assert_eq!(
        text(record![1, 2, 3, "0123456789"]),
        "nothing has changed: the record in bytes is 20; at most 16 is allowed (max_record_len)"
    );
    assert!(text(record![1, 2, f64::NAN]).contains("NaN"));
    let fixed = config.arity(Some(3));
    assert_eq!(fixed.check_record(&record![1, 2, 3, 4]), Err(CacheError::Arity { given: 4, allowed: 3 }));
    let pattern = |fields| fixed.check_pattern(&RecordPattern::new(fields).unwrap());
    assert_eq!(pattern(pattern![_, var(1), _]), Ok(()));
    assert_eq!(pattern(pattern![_, _, _, _]), Err(PatternError::Arity { given: 4, held: vec![3] }));
    assert!(matches!(pattern(pattern![_, _]), Err(PatternError::TooShort { field: 2, .. })));
}

#[test]
fn a_key_alone_finds_its_partition_only_where_it_decides_it() {
    let one = CacheConfig::default();
    assert_eq!(one.partition_of_key(&"k".into()), Ok(one.partition_of(&"k".into())));
    let two = CacheConfig::default().partition_field(1);
    let error = two.partition_of_key(&"k".into()).unwrap_err();
    assert_eq!(error, CacheError::KeyIsNotPartition { key_field: 0, partition_field: 1 });
    let record = record!["k", "p"];
    assert_eq!(two.key_and_partition(&record), Ok((&Term::from("k"), two.partition_of(&"p".into()))));
}

#[test]
fn peers_that_differ_are_told_both_values() {
    let peer = Peer::new(NodeId::new("b").unwrap(), Incarnation::MIN);
    let ours = CacheConfig::default();
    let same = ours.clone().tombstone_ttl(Duration::from_secs(9)).write_mode(WriteMode::Async);
    assert_eq!(ours.agrees_with(&same.terms(), &peer), Ok(()));
    let text = |theirs: CacheConfig| ours.agrees_with(&theirs.terms(), &peer).unwrap_err().to_string();
    assert_eq!(
        text(ours.clone().partitions(64)),
        "cache \"cache\": option partitions is 256 on this node and 64 on b#1; make them equal"
    );
    assert!(text(ours.clone().table(Table::Bag)).contains("table is set on this node and bag"));
    assert!(text(ours.clone().arity(Some(2))).contains("arity is none on this node and 2"));
    for theirs in [
        ours.clone().key_field(1),
        ours.clone().partition_field(1),
        ours.clone().replicas(3),
        ours.clone().expected_nodes(Some(3)),
        ours.clone().max_record_len(16),
    ] {
        assert!(ours.agrees_with(&theirs.terms(), &peer).is_err());
    }
    // a release that knows fewer or more of them
    let mut fewer = ours.terms();
    fewer.0.pop();
    assert!(ours.agrees_with(&fewer, &peer).unwrap_err().to_string().contains("unknown on b#1"));
}
