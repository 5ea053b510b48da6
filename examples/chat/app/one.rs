//! One node of a cluster of processes: its page for people, or its state for the check that started it.

use std::sync::Arc;

use super::Failure;
use super::cli::NodeOptions;
use super::cluster::{Cluster, Net, Node, Ports, Status};
use super::fleet;
use super::tcp::Mesh;

/// Runs until Ctrl-C or SIGTERM, or, if it is managed, until standard input ends; then leaves in order.
pub(crate) async fn run(options: &NodeOptions, ports: Ports) -> Result<(), Failure> {
    let name: Arc<str> = options.id.as_str().into();
    let mesh = Mesh::one(name.clone(), options.listen.clone(), options.seeds.clone(), options.trust.clone());
    let cluster = Cluster::start_on(Net::Tcp(mesh), vec![name], ports).await?;
    let node = cluster.first().ok_or("the node did not start")?;
    if options.managed {
        tokio::select! {
            () = tell(&node) => {}
            () = input_ends() => {}
        }
    } else {
        for (name, address) in cluster.addresses() {
            println!("{name} listens on {} and serves http://{address}/ (Ctrl-C ends it).", options.listen);
        }
        end_signal().await?;
    }
    cluster.stop_orderly(&node).await;
    Ok(())
}

async fn tell(node: &Node) {
    let mut changes = node.muster.changes();
    loop {
        let state = {
            let state = changes.borrow_and_update();
            (state.status == Status::Ready, state.view.len())
        };
        fleet::say(state);
        if changes.changed().await.is_err() {
            return;
        }
    }
}

async fn input_ends() {
    let (ended, end) = tokio::sync::oneshot::channel::<()>();
    std::thread::spawn(move || {
        // An error ends it, too.
        let _all = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        drop(ended);
    });
    let _end = end.await;
}

async fn end_signal() -> Result<(), Failure> {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let mut terminate = signal(SignalKind::terminate())?;
        tokio::select! {
            _ = terminate.recv() => Ok(()),
            end = tokio::signal::ctrl_c() => Ok(end?),
        }
    }
    #[cfg(not(unix))]
    Ok(tokio::signal::ctrl_c().await?)
}
