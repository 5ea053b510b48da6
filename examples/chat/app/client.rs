//! A websocket as the checks and the replay use it.

use std::net::SocketAddr;

use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::Message as Frame;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream};

use super::Failure;

pub(crate) type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;
pub(crate) type Sink = SplitSink<Socket, Frame>;
pub(crate) type Stream = SplitStream<Socket>;

/// Connects to the websocket of the node at this address.
pub(crate) async fn connect(address: SocketAddr) -> Result<(Sink, Stream), Failure> {
    let url = format!("ws://{address}/ws");
    let (socket, _) = tokio_tungstenite::connect_async_with_config(url, None, true).await?;
    Ok(socket.split())
}

/// Sends what has gathered as one frame.
pub(crate) async fn send(sink: &mut Sink, frame: impl Into<Frame>) -> Result<(), Failure> {
    Ok(sink.send(frame.into()).await?)
}
