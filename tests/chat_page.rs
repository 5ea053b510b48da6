//! The page of the chat example in a real browser: what is typed on one node's page is read on another's,
//! also when the node of the reader goes.
//!
//! Needs Chromium; without it the test is skipped with a printed reason, or fails if `MUSTER_REQUIRE_ALL=1`.
//! `MUSTER_SHOTS=DIR` writes screenshots of the page at two widths, light and dark.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[allow(dead_code)]
#[path = "../examples/chat/app/mod.rs"]
mod app;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use app::cluster::{Cluster, Ports};
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream};

/// How long the browser may take for anything that this test waits for.
const PATIENCE: Duration = Duration::from_secs(60);

/// A Chromium of our own, ended and cleaned up when dropped.
struct Browser {
    child: Child,
    profile: PathBuf,
    socket: WebSocketStream<MaybeTlsStream<TcpStream>>,
    calls: u64,
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _gone = self.child.wait();
        let _left_behind = std::fs::remove_dir_all(&self.profile);
    }
}

impl Browser {
    /// `None` if there is no Chromium here.
    async fn start() -> Option<Self> {
        let profile = std::env::temp_dir().join(format!("muster-chat-page-{}", std::process::id()));
        let mut child = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]
            .iter()
            .find_map(|name| launch(name, &profile).ok())?;
        let stderr = child.stderr.take().unwrap();
        let (found, address) = tokio::sync::oneshot::channel();
        // Read to the end, so that the browser never blocks on a full pipe.
        std::thread::spawn(move || {
            let mut found = Some(found);
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                if let Some((_, address)) = line.split_once("DevTools listening on ")
                    && let Some(found) = found.take()
                {
                    let _test_ended = found.send(address.trim().to_owned());
                }
            }
        });
        let address = tokio::time::timeout(PATIENCE, address).await.unwrap().expect("chromium ended early");
        let (socket, _) = tokio_tungstenite::connect_async(address).await.unwrap();
        Some(Self { child, profile, socket, calls: 0 })
    }

    async fn call(&mut self, session: Option<&str>, method: &str, params: Value) -> Value {
        self.calls += 1;
        let id = self.calls;
        let mut call = json!({ "id": id, "method": method, "params": params });
        if let Some(session) = session {
            call["sessionId"] = session.into();
        }
        self.socket.send(Message::text(call.to_string())).await.unwrap();
        let answer = async {
            loop {
                let Some(Ok(frame)) = self.socket.next().await else { panic!("the browser hung up") };
                let Message::Text(text) = frame else { continue };
                let value: Value = serde_json::from_str(&text).unwrap();
                if value["id"] == id {
                    return value;
                }
            }
        };
        let answer = tokio::time::timeout(PATIENCE * 2, answer).await.expect("the browser does not answer");
        assert!(answer.get("error").is_none(), "{method}: {}", answer["error"]);
        answer["result"].clone()
    }

    async fn open(&mut self, url: &str) -> String {
        let target =
            self.call(None, "Target.createTarget", json!({ "url": "about:blank", "newWindow": true })).await;
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let session = self.call(None, "Target.attachToTarget", attach).await;
        let session = session["sessionId"].as_str().unwrap().to_owned();
        self.call(Some(&session), "Emulation.setFocusEmulationEnabled", json!({ "enabled": true })).await;
        // Answered when the new page has taken the place of the blank one, so no script runs in the old one.
        self.call(Some(&session), "Page.navigate", json!({ "url": url })).await;
        session
    }

    async fn eval(&mut self, page: &str, script: &str) -> Value {
        let params = json!({ "expression": script, "awaitPromise": true, "returnByValue": true });
        let result = self.call(Some(page), "Runtime.evaluate", params).await;
        assert!(result.get("exceptionDetails").is_none(), "{script}: {}", result["exceptionDetails"]);
        result["result"]["value"].clone()
    }

    /// Waits until `condition` holds on the page.
    async fn until(&mut self, page: &str, condition: &str) {
        let script = format!(
            "new Promise((done) => {{ const end = Date.now() + {};
               const look = () => {{ let holds = false; try {{ holds = !!({condition}); }} catch {{ }}
                 if (holds) done(true); else if (Date.now() > end) done(false); else setTimeout(look, 15); }};
               look(); }})",
            PATIENCE.as_millis()
        );
        let held = self.eval(page, &script).await == true;
        if !held {
            let text = self.eval(page, "document.body.innerText").await;
            panic!("never came true: {condition}\nthe page reads: {text}");
        }
    }

    async fn enter(&mut self, page: &str, name: &str, rooms: &str) {
        self.until(page, "document.readyState === 'complete' && document.querySelector('#name')").await;
        self.write(page, "#name", name).await;
        self.write(page, "#first", rooms).await;
        self.key(page, "Enter").await;
        self.until(page, "document.querySelector('#subtitle').textContent.includes('you are on')").await;
    }

    /// Types into a field as a keyboard would, over what is in it.
    async fn write(&mut self, page: &str, field: &str, text: &str) {
        self.eval(
            page,
            &format!("document.querySelector('{field}').focus(); document.querySelector('{field}').select()"),
        )
        .await;
        self.call(Some(page), "Input.insertText", json!({ "text": text })).await;
    }

    async fn key(&mut self, page: &str, key: &str) {
        for kind in ["keyDown", "keyUp"] {
            let params = json!({ "type": kind, "key": key, "code": key, "windowsVirtualKeyCode": 13, "text": if kind == "keyDown" { "\r" } else { "" } });
            self.call(Some(page), "Input.dispatchKeyEvent", params).await;
        }
    }

    /// Presses a button of the cluster's panel as soon as it is there.
    async fn act(&mut self, page: &str, label: &str) {
        let button = format!("document.querySelector('[data-act=\"{label}\"]:not(:disabled)')");
        self.until(page, &format!("{button} && ({button}.click(), true)")).await;
    }

    async fn say(&mut self, page: &str, text: &str) {
        self.write(page, "#text", text).await;
        self.key(page, "Enter").await;
    }
}

fn launch(name: &str, profile: &Path) -> std::io::Result<Child> {
    Command::new(name)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"])
        .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
        .args(["--disable-background-timer-throttling", "--disable-renderer-backgrounding"])
        .args(["--disable-backgrounding-occluded-windows", "--remote-debugging-port=0"])
        .arg(format!("--user-data-dir={}", profile.display()))
        .arg("about:blank")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
}

/// Whether a message with this text is shown on the page.
fn shows(text: &str) -> String {
    format!(
        "[...document.querySelectorAll('#log .body')].some((body) => body.textContent === {})",
        json!(text)
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_typed_on_node_1_is_read_on_node_3() {
    let Some(mut browser) = Browser::start().await else {
        assert!(std::env::var("MUSTER_REQUIRE_ALL").as_deref() != Ok("1"), "no chromium found on the PATH");
        println!("skipped: no chromium found on the PATH");
        return;
    };
    let cluster = Cluster::start(3, Ports::Any).await.unwrap();
    let urls: Vec<_> = cluster.addresses().iter().map(|(_, address)| format!("http://{address}/")).collect();

    let ada = browser.open(&urls[0]).await;
    browser.enter(&ada, "Ada", "lobby").await;
    let grace = browser.open(&urls[2]).await;
    browser.enter(&grace, "Grace", "lobby").await;

    // Each sees the other, from another node.
    browser.until(&ada, "document.querySelector('#people-list').textContent.includes('Gracen3')").await;
    browser.until(&grace, "document.querySelector('#people-list').textContent.includes('Adan1')").await;

    // The message itself, as text and as nothing else.
    let text = "Hello <b>node 3</b> & שלום, from node 1";
    browser.say(&ada, text).await;
    browser.until(&grace, &shows(text)).await;
    browser.until(&ada, &format!("{} && !document.querySelector('.waiting')", shows(text))).await;
    browser.until(&ada, "document.querySelector('#receipt').textContent.includes('confirmed by n1')").await;
    let sent = browser.eval(&ada, "document.querySelectorAll('#log .body').length").await;
    assert_eq!(sent, 1, "shown once to its sender");

    // The node that Grace is on crashes without warning. What she says before her page has found another one
    // waits, and goes; what Ada says meanwhile reaches her there.
    browser.act(&ada, "Crash n3").await;
    browser.say(&grace, "after the crash").await;
    for number in 0..5 {
        browser.say(&ada, &format!("while n3 is gone {number}")).await;
    }
    browser.until(&ada, &shows("after the crash")).await;
    browser.until(&grace, "document.querySelector('#me').textContent.endsWith('on n1')").await;
    browser.until(&grace, "document.querySelector('[data-node=n3] .pill')?.textContent === 'down'").await;
    for number in 0..5 {
        browser.until(&grace, &shows(&format!("while n3 is gone {number}"))).await;
    }

    // It starts again, and Grace stops the node that both are on now: both move, in the middle of a word.
    browser.act(&ada, "Start n3").await;
    browser.until(&grace, "document.querySelector('[data-node=n3] .pill')?.textContent === 'Ready'").await;
    browser.act(&grace, "Stop n1").await;
    browser.say(&ada, "I am still here").await;
    browser.until(&grace, &shows("I am still here")).await;
    for page in [&ada, &grace] {
        browser.until(page, "document.querySelector('#me').textContent.match(/on n[23]$/)").await;
        browser.until(page, "document.querySelector('[data-node=n1] .pill')?.textContent === 'down'").await;
        browser.until(page, "!document.querySelector('.waiting')").await;
    }
    let twice = "new Set([...document.querySelectorAll('#log .body')].map((body) => body.textContent)).size";
    for page in [&ada, &grace] {
        let shown = browser.eval(page, "document.querySelectorAll('#log .body').length").await;
        assert_eq!(shown, browser.eval(page, twice).await, "something is shown twice");
        assert_eq!(shown, 8, "something is not shown");
    }
    if let Ok(folder) = std::env::var("MUSTER_SHOTS") {
        shots(&mut browser, &cluster, Path::new(&folder)).await;
    }
    drop(browser);
    cluster.shutdown().await;
}

/// Screenshots for people to look at.
async fn shots(browser: &mut Browser, cluster: &std::sync::Arc<Cluster>, folder: &Path) {
    std::fs::create_dir_all(folder).unwrap();
    for (name, _) in cluster.addresses() {
        let _runs_already = cluster.start_node(&name).await;
    }
    let urls: Vec<_> = cluster.addresses().iter().map(|(_, address)| format!("http://{address}/")).collect();
    let mut pages = Vec::new();
    for (index, name) in ["Ada", "Grace Brewster Murray Hopper", "לאה", "Linus"].iter().enumerate() {
        let page = browser.open(&urls[index % 3]).await;
        if index == 0 {
            browser
                .until(&page, "document.readyState === 'complete' && document.querySelector('#name')")
                .await;
            shot(browser, &page, folder, "door").await;
        }
        browser.enter(&page, name, "design review,room 3").await;
        if index == 0 {
            let many = "for (let n = 1; n < 25; n++) enterRoom('room ' + n); \
                        enterRoom('a-room-with-quite-a-long-name-for-a-phone'); enterRoom('שולחן'); look('design review')";
            browser.eval(&page, many).await;
        }
        pages.push(page);
    }
    let talk = [
        (0, "Shall we ship the new router today?"),
        (1, "All nodes are Ready here. I stopped n2 twice while the load test ran, nothing was lost."),
        (1, "And the restart took less than a blink."),
        (2, "בדקתי גם את הצד שלי והכול עובד"),
        (
            3,
            "<script>alert('not today')</script> https://example.com/a/very/long/path/that/does/not/break/anywhere/unless/it/has/to/because/the/page/is/narrow",
        ),
        (0, "Looks fine:\n  targeted  2 nodes\n  flooded   0"),
        (1, "👍"),
        (0, "Then let us do it."),
    ];
    for (who, text) in talk {
        browser.say(&pages[who], text).await;
        browser.until(&pages[0], &shows(text)).await;
    }
    browser.eval(&pages[1], "look('room 3')").await;
    browser.say(&pages[1], "ping").await;
    browser.until(&pages[0], "[...rooms.values()].some((room) => room.unread)").await;
    shot(browser, &pages[0], folder, "chat").await;
    for drawer in ["rooms", "people", "cluster"] {
        browser.eval(&pages[0], &format!("document.querySelector('#open-{drawer}').click()")).await;
        shot(browser, &pages[0], folder, drawer).await;
        browser.eval(&pages[0], "close()").await;
    }
    cluster.stop_node("n2", app::cluster::Stop::Crash).await.unwrap();
    browser.until(&pages[0], "document.querySelector('[data-node=n2] .pill')?.textContent === 'down'").await;
    browser.eval(&pages[0], "again = () => {}; link.socket.close(); undefined").await;
    browser.until(&pages[0], "!link").await;
    browser.say(&pages[0], "typed without a connection").await;
    shot(browser, &pages[0], folder, "banner").await;
}

async fn shot(browser: &mut Browser, page: &str, folder: &Path, name: &str) {
    for (width, height) in [(390, 844), (1280, 800)] {
        for scheme in ["light", "dark"] {
            let size =
                json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500 });
            browser.call(Some(page), "Emulation.setDeviceMetricsOverride", size).await;
            let media = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }, { "name": "prefers-reduced-motion", "value": "reduce" }] });
            browser.call(Some(page), "Emulation.setEmulatedMedia", media).await;
            browser.eval(page, "new Promise((done) => setTimeout(done, 300))").await;
            let over = browser.eval(page, "document.documentElement.scrollWidth - innerWidth").await;
            assert_eq!(over, 0, "{name} is wider than {width} px");
            let image = browser.call(Some(page), "Page.captureScreenshot", json!({ "format": "png" })).await;
            let file = folder.join(format!("{name}-{width}-{scheme}.png"));
            std::fs::write(file, base64(image["data"].as_str().unwrap())).unwrap();
        }
    }
}

fn base64(text: &str) -> Vec<u8> {
    let value = |letter: u8| match letter {
        b'A'..=b'Z' => letter - b'A',
        b'a'..=b'z' => letter - b'a' + 26,
        b'0'..=b'9' => letter - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut held) = (0u32, 0);
    for letter in text.bytes().filter(|letter| *letter != b'=') {
        bits = bits << 6 | u32::from(value(letter));
        held += 6;
        if held >= 8 {
            held -= 8;
            bytes.push((bits >> held) as u8);
        }
    }
    bytes
}
