//! The nodes over NATS, all in this process, with a server of their own or one that is there.

use std::collections::HashMap;
use std::sync::Arc;

use muster_router::transport::Transport;
use muster_router::transport::nats::NatsTransport;
use parking_lot::Mutex;

use super::Failure;

#[path = "../../../tests/nats_server/process.rs"]
mod process;

use process::NatsServer;
pub(crate) use process::is_installed;

pub(crate) struct Nats {
    url: String,
    /// Started by us, and ends with us.
    server: Mutex<Option<NatsServer>>,
    lives: Mutex<HashMap<String, NatsTransport>>,
}

impl Nats {
    /// Over the server of that address, or one that is started for it.
    pub(crate) fn start(url: Option<String>) -> Result<Self, Failure> {
        let (url, server) = match url {
            Some(url) => (url, None),
            None if is_installed("--transport nats without --nats URL") => {
                let server = NatsServer::start();
                (server.url(), Some(server))
            }
            None => return Err("nats-server was not found: install it, or give one with --nats URL".into()),
        };
        Ok(Self { url, server: Mutex::new(server), lives: Mutex::default() })
    }

    pub(crate) fn transport(&self, name: &str) -> Result<Arc<dyn Transport>, Failure> {
        // checks that run at once on one server do not meet
        let prefix = format!("muster-chat-{}", std::process::id());
        let transport = NatsTransport::builder(name).servers(&self.url).prefix(prefix).build()?;
        self.lives.lock().insert(name.to_owned(), transport.clone());
        Ok(Arc::new(transport))
    }

    /// Ends a node without a goodbye.
    pub(crate) async fn crash(&self, name: &str) {
        let life = self.lives.lock().remove(name);
        if let Some(life) = life {
            life.crash().await;
        }
    }

    /// Kills the server and starts it again, if it is ours; whether it is.
    pub(crate) async fn restart_server(self: &Arc<Self>) -> Result<bool, Failure> {
        let this = self.clone();
        let restarted = tokio::task::spawn_blocking(move || {
            let mut server = this.server.lock();
            let Some(server) = &mut *server else { return false };
            server.kill();
            server.run();
            true
        });
        Ok(restarted.await?)
    }
}
