#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    muster_router::testing::fuzz::cache_strong(input);
});
