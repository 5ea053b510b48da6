//! The HTTP side of one node: the page and the websocket.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};

use axum::Router;
use axum::extract::State;
use axum::extract::ws::WebSocketUpgrade;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpStream;
use tokio::sync::mpsc;

use super::cluster::{Cluster, Node, Phase};
use super::wire::MAX_FRAME;

const PAGE: &str = include_str!("page/chat.html");
const STYLE: &str = include_str!("page/chat.css");
const SCRIPT: &str = include_str!("page/chat.js");

/// Nothing from elsewhere, no script from a message; websockets also to the other nodes.
const POLICY: &str =
    "default-src 'self'; connect-src 'self' ws:; img-src data:; base-uri 'none'; form-action 'none'";

/// Serves one life of a node; what is sent to it must be connections of its port.
pub(crate) fn serve(address: SocketAddr, node: Arc<Node>, cluster: Weak<Cluster>) -> mpsc::Sender<TcpStream> {
    let (streams, handed) = mpsc::channel(1024);
    let mut phase = node.phase.subscribe();
    let app = Router::new()
        .route("/", get(async || page("text/html; charset=utf-8", PAGE)))
        .route("/chat.css", get(async || page("text/css; charset=utf-8", STYLE)))
        .route("/chat.js", get(async || page("text/javascript; charset=utf-8", SCRIPT)))
        .route("/ws", get(websocket))
        .with_state((node, cluster));
    let ended = async move {
        // An error means that the node is gone, which is an end, too.
        let _end = phase.wait_for(|phase| matches!(phase, Phase::Closed | Phase::Crashed)).await;
    };
    tokio::spawn(
        async move { axum::serve(Handed { handed, address }, app).with_graceful_shutdown(ended).await },
    );
    streams
}

fn page(kind: &'static str, body: &'static str) -> impl IntoResponse {
    // A page must not keep a connection to a node that stops.
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::CACHE_CONTROL, "no-store"),
        (header::CONNECTION, "close"),
    ];
    (headers, body)
}

async fn websocket(
    State((node, cluster)): State<(Arc<Node>, Weak<Cluster>)>,
    headers: HeaderMap,
    upgrade: WebSocketUpgrade,
) -> Response {
    if !same_host(&headers) {
        // Or any web page that somebody visits could stop nodes here.
        return (StatusCode::FORBIDDEN, "this page is not of this host\n").into_response();
    }
    upgrade
        .max_message_size(MAX_FRAME)
        .max_frame_size(MAX_FRAME)
        .on_upgrade(move |socket| super::session::run(socket, node, cluster))
}

/// Whether the page that connects comes from the host that it connects to, on whatever port; a client that
/// is no browser names no origin.
fn same_host(headers: &HeaderMap) -> bool {
    let text = |name| headers.get(name).map(|value: &header::HeaderValue| value.to_str().unwrap_or_default());
    let name = |address: &str| address.rsplit_once(':').map_or(address, |(name, _)| name).to_owned();
    match (text(header::ORIGIN), text(header::HOST)) {
        (None, _) => true,
        (Some(origin), Some(host)) => {
            origin.split_once("://").is_some_and(|(_, origin)| name(origin) == name(host))
        }
        (Some(_), None) => false,
    }
}

/// Connections that the cluster's listener accepted while this node lives.
struct Handed {
    handed: mpsc::Receiver<TcpStream>,
    address: SocketAddr,
}

impl axum::serve::Listener for Handed {
    type Io = TcpStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (TcpStream, SocketAddr) {
        match self.handed.recv().await {
            Some(stream) => {
                // Small frames must not wait for the acknowledgement of the ones before.
                let _as_it_is = stream.set_nodelay(true);
                let peer = stream.peer_addr().unwrap_or(self.address);
                (stream, peer)
            }
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
    }
}
