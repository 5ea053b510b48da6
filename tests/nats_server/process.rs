//! A real `nats-server` on a free port.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::Read;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(30);

/// Whether there is a `nats-server` to run. If not, says so; with `MUSTER_REQUIRE_ALL=1` that is a failure.
pub fn is_installed(what: &str) -> bool {
    let found =
        Command::new("nats-server").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if found.is_ok_and(|status| status.success()) {
        return true;
    }
    let required = std::env::var("MUSTER_REQUIRE_ALL").is_ok_and(|value| value == "1");
    assert!(!required, "nats-server was not found, and MUSTER_REQUIRE_ALL=1");
    println!("{what} is skipped: nats-server was not found (apt-get install nats-server)");
    false
}

/// Ends with this value, and also when the process that has it ends in any other way.
pub struct NatsServer {
    child: Option<Child>,
    directory: PathBuf,
    port: u16,
    extra: Vec<String>,
    config: Option<PathBuf>,
}

impl NatsServer {
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// With the text of a configuration file.
    pub fn start_configured(config: &str) -> Self {
        Self::make(&[], Some(config))
    }

    /// With more arguments.
    pub fn start_with(extra: &[&str]) -> Self {
        Self::make(extra, None)
    }

    fn make(extra: &[&str], config: Option<&str>) -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let number = LAST.fetch_add(1, Ordering::Relaxed);
        let directory = std::env::temp_dir().join(format!("muster-nats-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a temporary directory");
        let extra = extra.iter().map(|argument| (*argument).to_owned()).collect();
        // beside the directory, which is emptied at every start
        let config = config.map(|text| {
            let file = directory.with_extension("conf");
            std::fs::write(&file, text).expect("a temporary file");
            file
        });
        let mut server = Self { child: None, directory, port: 0, extra, config };
        server.run();
        server
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    pub fn url(&self) -> String {
        format!("nats://{}", self.address())
    }

    /// Kills it, as `kill -9` does.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            // the shell around it reads to the end of its input, then kills it
            drop(child.stdin.take());
            let _ = child.wait();
        }
    }

    /// On the same port.
    pub fn run(&mut self) {
        assert!(self.child.is_none(), "it runs already");
        for file in std::fs::read_dir(&self.directory).expect("readable").flatten() {
            let _ = std::fs::remove_file(file.path());
        }
        let script = r#"nats-server "$@" & server=$!; read -r _; kill -9 $server; wait $server"#;
        let port = if self.port == 0 { "-1".to_owned() } else { self.port.to_string() };
        let child = Command::new("sh")
            .args(["-c", script, "nats-server", "-a", "127.0.0.1", "-p", &port, "--ports_file_dir"])
            .arg(&self.directory)
            .args(self.config.iter().flat_map(|file| ["-c".as_ref(), file.as_os_str()]))
            .args(&self.extra)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("a shell");
        self.child = Some(child);
        let start = Instant::now();
        while !self.is_up() {
            assert!(start.elapsed() < PATIENCE, "nats-server did not start");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Whether it has written its port and greets.
    fn is_up(&mut self) -> bool {
        let files = std::fs::read_dir(&self.directory).into_iter().flatten().flatten();
        let Some(file) =
            files.map(|file| file.path()).find(|path| path.extension().is_some_and(|e| e == "ports"))
        else {
            return false;
        };
        let text = std::fs::read_to_string(file).unwrap_or_default();
        let port =
            text.split("nats://127.0.0.1:").nth(1).and_then(|rest| rest.split('"').next()?.parse().ok());
        let Some(port) = port else { return false };
        self.port = port;
        let Ok(mut stream) = std::net::TcpStream::connect(self.address()) else { return false };
        let mut greeting = [0; 4];
        stream.read_exact(&mut greeting).is_ok_and(|()| greeting == *b"INFO")
    }
}

impl Drop for NatsServer {
    fn drop(&mut self) {
        self.kill();
        let _ = std::fs::remove_dir_all(&self.directory);
        if let Some(file) = &self.config {
            let _ = std::fs::remove_file(file);
        }
    }
}
