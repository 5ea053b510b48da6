#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let read = |text: &[u8]| serde_json::from_slice(text).ok();
    let write = |config: &_| serde_json::to_vec(config).ok();
    muster_router::testing::fuzz::config(input, read, write);
});
