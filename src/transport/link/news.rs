//! What strange input was logged already: one line for each peer and cause, however often it comes.

use std::collections::BTreeSet;

use crate::types::NodeId;

/// How many lines there are at most: whoever comes under one name after the other does not fill the log.
const MOST: usize = 1024;

/// See the module.
#[derive(Clone, Debug, Default)]
pub(crate) struct News {
    logged: BTreeSet<(Option<NodeId>, &'static str)>,
}

impl News {
    /// `node`: a peer with a session. All others together are `None`, since they may claim any name.
    pub(crate) fn is_news(&mut self, node: Option<&NodeId>, cause: &'static str) -> bool {
        self.logged.len() < MOST && self.logged.insert((node.cloned(), cause))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn once_for_each_peer_and_cause_and_not_for_ever() {
        let mut news = News::default();
        let node = |name: &str| NodeId::new(name).unwrap();
        assert!(news.is_news(None, "malformed") && !news.is_news(None, "malformed"));
        assert!(news.is_news(Some(&node("a")), "malformed") && news.is_news(Some(&node("a")), "unknown"));
        assert!(!news.is_news(Some(&node("a")), "malformed"));
        let logged = (0..10_000).filter(|n| news.is_news(Some(&node(&format!("n{n}"))), "malformed")).count();
        assert_eq!(logged, MOST - 3);
    }
}
