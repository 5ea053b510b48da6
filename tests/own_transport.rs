//! The transport of the guide `own_transport`, which is `own_transport/post.rs` word for word, held against the
//! conformance suite that the guide recommends.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot go on says so by panicking"
)]

use muster_router::testing::conformance::{Harness, Unsupported, patient_links};

include!("own_transport/post.rs");

#[test]
fn the_guide_shows_this_code() {
    let guide = include_str!("../src/guide/own_transport.md");
    assert!(
        guide.contains(include_str!("own_transport/post.rs")),
        "src/guide/own_transport.md and post.rs differ"
    );
}

#[derive(Default)]
struct PostOffice(Office, Mutex<BTreeMap<String, Arc<Post>>>);

#[async_trait]
impl Harness for PostOffice {
    async fn new() -> Self {
        Self::default()
    }
    async fn transport(&self, node: &str) -> Arc<dyn Transport> {
        let endpoint = Endpoint::new(NodeId::new(node).unwrap(), patient_links());
        let post = Arc::new(Post { endpoint, office: self.0.clone() });
        self.1.lock().insert(node.to_owned(), post.clone());
        post
    }
    fn peers(&self) -> usize {
        12
    }
    async fn blip(&self, a: &str, b: &str) -> Result<(), Unsupported> {
        self.1.lock()[a].endpoint.break_connection(&NodeId::new(b).unwrap());
        Ok(())
    }
    async fn crash(&self, node: &str) -> Result<(), Unsupported> {
        let crashing = self.1.lock()[node].clone();
        crashing.endpoint.abort().await;
        Ok(())
    }
}

muster_router::transport_conformance!(PostOffice);
