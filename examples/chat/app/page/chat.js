'use strict';
// The page of one node. It keeps what it has to say until a node has confirmed it, moves to another node when
// its own one goes, and drops second copies by the message's id, so nothing is lost and nothing shown twice.

const $ = (id) => document.getElementById(id);
const make = (tag, cls, text) => {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  if (text !== undefined) node.textContent = text;
  return node;
};

const KEEP = 400;          // messages shown a room
const PATIENCE = 8000;     // ms after which a silent new connection counts as failed

const me = { user: crypto.randomUUID?.() ?? 'u' + Math.random().toString(36).slice(2), name: '', said: 0 };
const rooms = new Map();   // name -> { lines, ids, people, unread, log position }
const outbox = new Map();  // id -> { room, text, at }: said, not yet confirmed
let places = [];           // all nodes, { name, port }
let current = null;        // name of the room that is shown
let link = null;           // the connection that is used
let next = null;           // the connection that will replace it
let picture = null;        // the cluster as last heard
let lastReceipt = null;
let counter = 1;
let tries = 0;
let note = null;

// ---- connections ----------------------------------------------------------------------------------

const home = { name: null, port: Number(location.port) || 80 };

function connect(place) {
  const conn = { place, socket: null, waiting: new Map(), joined: new Set(), node: null, alive: true, going: false };
  const secure = location.protocol === 'https:' ? 'wss' : 'ws';
  conn.socket = new WebSocket(`${secure}://${location.hostname}:${place.port}/ws`);
  conn.timer = setTimeout(() => conn.socket.close(), PATIENCE);
  conn.socket.onmessage = (frame) => { for (const event of JSON.parse(frame.data)) hear(conn, event); };
  conn.socket.onclose = () => closed(conn);
  next = conn;
  return conn;
}

function ask(conn, command, done) {
  const re = counter++;
  if (done) conn.waiting.set(re, done);
  conn.socket.send(JSON.stringify({ ...command, re }));
}

function closed(conn) {
  if (!conn.alive) return;
  conn.alive = false;
  clearTimeout(conn.timer);
  const done = [...conn.waiting.values()];
  conn.waiting.clear();
  for (const answer of done) answer({ is: 'lost' });
  if (conn === next) next = null;
  if (conn === link) link = null;
  if (!next && (!link || link.going)) again();
  show();
}

// Another node, or the same one again when it was the only one; slower each round.
function again() {
  tries += 1;
  const up = (place) => (picture?.nodes.find((node) => node.name === place.name)?.state ?? 'up') === 'up';
  const all = places.length ? places : [home];
  const from = all.findIndex((place) => place.name === (again.last ?? link?.node));
  const order = all.map((_, step) => all[(from + 1 + step) % all.length]);
  const place = (tries <= all.length && order.find(up)) || order[0];
  again.last = place.name;
  const wait = tries <= 1 ? 0 : Math.min(2000, 120 * 2 ** Math.floor(tries / all.length));
  setTimeout(() => { if (!next && (!link || link.going)) connect(place); }, wait);
}

function move(conn) {
  conn.going = true;
  again.last = conn.node;
  tries = 0;
  if (!next) again();
  show();
}

// A connection is used once all rooms are joined over it; the old one serves until then.
function welcome(conn, event) {
  clearTimeout(conn.timer);
  conn.node = event.node;
  places = event.nodes;
  home.name ??= event.node;
  for (const room of rooms.keys()) joinOver(conn, room);
  ready(conn);
}

function joinOver(conn, room) {
  ask(conn, { do: 'join', user: me.user, name: me.name, room }, (answer) => {
    if (answer.is === 'ok') {
      conn.joined.add(room);
      ready(conn);
    } else if (answer.is === 'failed' && conn.alive) {
      // The cluster is changing under us; the same question a little later.
      setTimeout(() => { if (conn.alive && rooms.has(room)) joinOver(conn, room); }, 400);
    }
  });
}

function ready(conn) {
  if (conn !== next || [...rooms.keys()].some((room) => !conn.joined.has(room))) return;
  const old = link;
  next = null;
  link = conn;
  tries = 0;
  again.last = null;
  if (old || ready.before) tell(`You are on ${conn.node} now.`, 'good', 2500);
  ready.before = true;
  watch();
  // What was not confirmed goes again under its old id.
  for (const [id, item] of outbox) if (!item.over?.alive) send(id, item);
  if (old?.alive) leaveOver(old);
  show();
}

// The old connection closes when what it still has to confirm is confirmed.
function leaveOver(old) {
  const end = () => { old.alive = false; old.socket.close(); for (const [id, item] of outbox) if (item.over === old) send(id, item); };
  const pending = [...outbox.values()].some((item) => item.over === old);
  if (pending) setTimeout(end, 700); else end();
}

function watch() {
  if (link?.socket.readyState === WebSocket.OPEN) link.socket.send(JSON.stringify({ do: 'watch', room: current }));
}

// ---- what is said ---------------------------------------------------------------------------------

function say(text) {
  me.said += 1;
  const id = `${me.user}-${me.said}`;
  const item = { room: current, text, at: Date.now(), over: null };
  outbox.set(id, item);
  add(current, { id, user: me.user, name: me.name, text, at: item.at, origin: link?.node ?? '', mine: true, waiting: true });
  if (link) send(id, item);
  show();
}

function send(id, item) {
  const conn = link;
  if (!conn || conn.socket.readyState !== WebSocket.OPEN) return;
  item.over = conn;
  ask(conn, { do: 'say', user: me.user, name: me.name, room: item.room, id, text: item.text }, (answer) => {
    if (answer.is === 'sent') {
      outbox.delete(id);
      lastReceipt = { ...answer, room: item.room, node: conn.node };
      settle(item.room, id);
      show();
    } else if (answer.is === 'failed' && outbox.has(id)) {
      setTimeout(() => { if (outbox.has(id) && link?.alive) send(id, item); }, 500);
    }
  });
}

function settle(room, id) {
  const line = rooms.get(room)?.lines.find((one) => one.id === id);
  if (!line?.waiting) return;
  line.waiting = false;
  line.element?.classList.remove('waiting');
}

function hear(conn, event) {
  const done = event.re != null && conn.waiting.get(event.re);
  if (done) {
    conn.waiting.delete(event.re);
    done(event);
    return;
  }
  switch (event.is) {
    case 'welcome': welcome(conn, event); break;
    case 'said': add(event.room, { ...event.said, origin: event.origin }); break;
    case 'past': event.said.forEach((said) => add(event.room, { ...said, old: true })); break;
    case 'who': {
      const room = rooms.get(event.room);
      if (room && (conn === link || !link?.joined.has(event.room) || link.going)) {
        room.people = event.people;
        if (event.room === current) showPeople();
        showTop();
      }
      break;
    }
    case 'cluster': if (conn === link) { picture = event.picture; showCluster(); showTop(); } break;
    case 'going': move(conn); break;
  }
}

function add(name, said) {
  const room = rooms.get(name);
  if (!room) return;
  if (room.ids.has(said.id)) {
    if (said.user === me.user) settle(name, said.id);
    return;
  }
  room.ids.add(said.id);
  said.mine = said.user === me.user;
  // By the time of the sender's node; what comes late goes where it belongs.
  let place = room.lines.length;
  while (place > 0 && said.old && room.lines[place - 1].at > said.at) place -= 1;
  room.lines.splice(place, 0, said);
  if (room.lines.length > KEEP) {
    const gone = room.lines.shift();
    gone.element?.remove();
  }
  if (name !== current) {
    if (!said.old && !said.mine) room.unread += 1;
    showRooms();
    return;
  }
  if (place === room.lines.length - 1) appendLine(room.lines.at(-2), said); else showLog();
}

// ---- rooms ----------------------------------------------------------------------------------------

function enterRoom(name) {
  name = name.trim().replace(/^#+/, '').trim();
  if (!name) return;
  if (!rooms.has(name)) {
    rooms.set(name, { lines: [], ids: new Set(), people: [], unread: 0 });
    for (const conn of [link, next]) if (conn?.alive && conn.node) joinOver(conn, name);
  }
  look(name);
}

function leaveRoom(name) {
  rooms.delete(name);
  for (const conn of [link, next]) {
    if (conn?.alive && conn.node) ask(conn, { do: 'leave', user: me.user, room: name });
    conn?.joined.delete(name);
  }
  if (next) ready(next);
  if (current === name) look([...rooms.keys()][0] ?? null);
  show();
}

function look(name) {
  current = name;
  if (name) rooms.get(name).unread = 0;
  close();
  watch();
  show();
  showLog();
}

// ---- showing --------------------------------------------------------------------------------------

function hue(text) {
  let sum = 0;
  for (const letter of text) sum = (sum * 31 + letter.codePointAt(0)) % 360;
  return sum;
}

function face(user, name) {
  const node = make('span', 'face', [...name.trim()][0]?.toUpperCase() ?? '?');
  node.style.setProperty('--hue', hue(user));
  node.setAttribute('aria-hidden', 'true');
  return node;
}

function appendLine(before, said) {
  const log = $('log');
  const low = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  const line = make('li', 'line');
  said.element = line;
  if (before && before.user === said.user && before.origin === said.origin && said.at - before.at < 120000) line.classList.add('more');
  if (said.mine) line.classList.add('mine');
  if (said.waiting) line.classList.add('waiting');
  const from = make('div', 'from');
  const name = make('b', '', said.name || 'nobody');
  name.dir = 'auto';
  const time = make('time', '', new Date(said.at).toLocaleTimeString([], { hour: '2-digit', minute: '2-digit' }));
  time.dateTime = new Date(said.at).toISOString();
  from.append(name, time);
  if (said.origin) from.append(make('span', 'tag', `via ${said.origin}`));
  const body = make('p', 'body', said.text);
  body.dir = 'auto';
  line.append(face(said.user, said.name || '?'), from, body);
  log.append(line);
  $('empty').hidden = true;
  if (low || said.mine) log.scrollTop = log.scrollHeight;
  else $('newest').hidden = false;
}

function showLog() {
  const log = $('log');
  log.replaceChildren();
  const lines = rooms.get(current)?.lines ?? [];
  lines.forEach((said, index) => appendLine(lines[index - 1], said));
  $('empty').hidden = lines.length > 0;
  log.scrollTop = log.scrollHeight;
  $('newest').hidden = true;
}

function showRooms() {
  const list = $('room-list');
  const rows = [...rooms].map(([name, room]) => {
    const row = make('li', name === current ? 'now' : room.unread ? 'unread' : '');
    const go = make('button', 'go');
    go.type = 'button';
    go.dataset.room = name;
    if (name === current) go.setAttribute('aria-current', 'true');
    const label = make('span', 'room-name', name);
    label.dir = 'auto';
    label.title = name;
    go.append(label);
    if (room.unread) {
      const count = make('span', 'count', room.unread > 99 ? '99+' : room.unread);
      count.setAttribute('aria-label', `${room.unread} unread`);
      go.append(count);
    }
    go.onclick = () => look(name);
    const leave = make('button', 'leave', '×');
    leave.type = 'button';
    leave.setAttribute('aria-label', `Leave ${name}`);
    leave.onclick = () => leaveRoom(name);
    row.append(go, leave);
    return row;
  });
  const focused = document.activeElement?.dataset?.room;
  list.replaceChildren(...rows);
  if (focused) list.querySelector(`[data-room="${CSS.escape(focused)}"]`)?.focus();
  $('unread-badge').hidden = ![...rooms.values()].some((room) => room.unread);
}

function showTop() {
  const room = rooms.get(current);
  $('title').textContent = current ?? 'No room';
  const people = room?.people.length ?? 0;
  const route = picture?.room?.name === current ? picture.room : null;
  const parts = [];
  if (room) parts.push(people === 1 ? '1 person' : `${people} people`);
  if (route) parts.push(route.router ? `routed by ${route.router}` : 'flooding while the view changes');
  if (link) parts.push(`you are on ${link.node}`);
  $('subtitle').textContent = parts.join(' · ');
  const fine = picture?.nodes.every((node) => node.state === 'up' && node.status === 'Ready');
  $('cluster-light').className = fine ? 'dot' : 'dot warn';
  document.title = current ? `#${current} · Muster chat` : 'Muster chat';
  $('me').textContent = link ? `${me.name} · on ${link.node}` : `${me.name} · not connected`;
  $('text').disabled = !current;
  $('text').placeholder = current ? `Message #${current}` : 'Join a room to talk';
}

function showPeople() {
  const people = rooms.get(current)?.people ?? [];
  $('people-count').textContent = people.length || '';
  $('people-list').replaceChildren(...people.map((person) => {
    const row = make('li');
    const name = make('span', 'who', (person.name || 'nobody') + (person.user === me.user ? ' (you)' : ''));
    name.dir = 'auto';
    name.title = person.name;
    row.append(face(person.user, person.name || '?'), name, make('span', 'tag', person.node));
    return row;
  }));
}

const MOOD = { Ready: 'good', Converging: 'warn', Rebalancing: 'warn' };

function chip(text, kind) { return make('span', kind ? `pill ${kind}` : 'pill', text); }

function fact(label, ...chips) {
  const row = make('div');
  const box = make('span', 'chips');
  box.append(...chips);
  row.append(make('span', '', label), box);
  return row;
}

function showCluster() {
  if (!picture) return;
  const room = picture.room;
  const facts = [];
  if (room && room.name === current) {
    facts.push(fact('Routed by', room.router ? chip(room.router, 'good') : chip('nobody: flooding', 'warn')));
    const holders = Object.entries(room.holders);
    facts.push(fact('Held by', ...(holders.length ? holders.map(([node]) => chip(node)) : [chip('no node')])));
    facts.push(fact('Table says', ...(room.table.length ? room.table.map((node) => chip(node)) : [chip(room.router ? 'the router only' : '–')])));
  }
  if (lastReceipt) {
    facts.push(fact('Last sent', chip(lastReceipt.decision, lastReceipt.decision === 'targeted' ? 'good' : 'warn'), ...(lastReceipt.nodes == null ? [] : [chip(nodes(lastReceipt.nodes))])));
  }
  $('route').replaceChildren(...facts);
  const focused = document.activeElement?.dataset?.act;
  const alone = picture.nodes.filter((node) => node.state === 'up').length < 2;
  $('node-list').replaceChildren(...picture.nodes.map((node) => nodeCard(node, alone)));
  if (focused) document.querySelector(`[data-act="${CSS.escape(focused)}"]:not(:disabled)`)?.focus();
}

function nodes(count) { return count === 1 ? 'to 1 node' : `to ${count} nodes`; }

function nodeCard(node, alone) {
  const here = link?.node === node.name;
  const card = make('li', [here && 'here', node.state === 'down' && 'down'].filter(Boolean).join(' '));
  card.dataset.node = node.name;
  const head = make('div', 'node-head');
  head.append(make('b', '', node.name));
  const status = node.state === 'up' ? node.status : node.state;
  head.append(chip(status, node.state === 'up' ? MOOD[node.status] ?? 'warn' : node.state === 'down' ? 'bad' : 'warn'));
  if (here) head.append(chip('you'));
  head.append(make('span', 'grow'));
  if (node.state === 'up') {
    const open = make('a', '', `:${node.port}`);
    open.href = `${location.protocol}//${location.hostname}:${node.port}/`;
    open.target = '_blank';
    open.rel = 'noopener';
    open.setAttribute('aria-label', `Open the page of ${node.name} in a new tab`);
    head.append(open);
  }
  card.append(head);
  if (node.view.length) {
    const sockets = node.sessions === 1 ? '1 connection' : `${node.sessions} connections`;
    card.append(make('div', 'facts', `sees ${node.view.join(', ')} · ${sockets}`));
  }
  const acts = make('div', 'acts');
  const act = (label, cls, command, off) => {
    const button = make('button', cls, label);
    button.type = 'button';
    button.dataset.act = `${label} ${node.name}`;
    button.setAttribute('aria-label', `${label} ${node.name}`);
    button.disabled = off;
    button.onclick = () => manage(label, node.name, command);
    acts.append(button);
  };
  const name = node.name;
  if (node.state === 'up') {
    act('Stop', '', { do: 'stop', node: name }, alone);
    act('Crash', 'danger', { do: 'stop', node: name, crash: true }, alone);
  } else if (node.state === 'down') {
    act('Start', 'start', { do: 'start', node: name }, false);
  }
  if (acts.childElementCount) card.append(acts);
  return card;
}

function manage(label, node, command) {
  if (!link) return;
  const began = performance.now();
  $('manage-note').textContent = `${label} ${node} …`;
  ask(link, command, (answer) => {
    const took = Math.round(performance.now() - began);
    $('manage-note').textContent =
      answer.is === 'failed' ? `${label} ${node}: ${answer.why}`
        : answer.is === 'ok' ? `${label} ${node}: done in ${took} ms` : '';
  });
}

function tell(text, kind, time) {
  clearTimeout(note?.timer);
  note = { text, kind, timer: time ? setTimeout(() => { note = null; showBanner(); }, time) : 0 };
  showBanner();
}

function showBanner() {
  const banner = $('banner');
  const kept = outbox.size;
  const keep = kept ? ` ${kept === 1 ? '1 message is' : `${kept} messages are`} kept and will be sent.` : '';
  let text = '';
  let kind = '';
  if (!link) text = `Connecting to another node …${keep}`;
  else if (link.going) text = `${link.node} is stopping; moving to another node …`;
  else if (note) ({ text, kind } = note);
  banner.textContent = text;
  banner.className = kind;
  banner.hidden = !text;
}

function showReceipt() {
  const box = $('receipt');
  if (!lastReceipt) { box.textContent = ''; return; }
  const good = lastReceipt.decision === 'targeted';
  box.replaceChildren(chip(lastReceipt.decision, good ? 'good' : 'warn'),
    make('span', '', `Last message ${lastReceipt.nodes == null ? 'delivered' : nodes(lastReceipt.nodes)}, confirmed by ${lastReceipt.node}`));
}

function show() {
  showTop();
  showRooms();
  showPeople();
  showBanner();
  showReceipt();
  showCluster();
}

// ---- drawers and forms ----------------------------------------------------------------------------

const drawers = { 'open-rooms': 'rooms', 'open-people': 'people', 'open-cluster': 'cluster' };

function close() {
  for (const [button, pane] of Object.entries(drawers)) {
    $(pane).classList.remove('open');
    $(button).setAttribute('aria-expanded', 'false');
  }
  $('shade').hidden = true;
}

for (const [button, pane] of Object.entries(drawers)) {
  $(button).onclick = () => {
    close();
    $(pane).classList.add('open');
    $(button).setAttribute('aria-expanded', 'true');
    $('shade').hidden = false;
    $(pane).querySelector('.close').focus();
  };
  $(pane).querySelector('.close').onclick = () => { close(); $(button).focus(); };
}
$('shade').onclick = close;
document.addEventListener('keydown', (event) => { if (event.key === 'Escape') close(); });

$('enter').onsubmit = (event) => {
  event.preventDefault();
  me.name = $('name').value.trim();
  if (!me.name || !$('first').value.trim()) { $('door-note').textContent = 'A name and a room, please.'; return; }
  try { localStorage.setItem('name', me.name); } catch { /* a private window */ }
  $('door').hidden = true;
  $('app').hidden = false;
  for (const room of $('first').value.split(',')) enterRoom(room);
  look([...rooms.keys()][0] ?? null);
  connect(home);
  show();
  $('text').focus();
};

$('add-room').onsubmit = (event) => {
  event.preventDefault();
  enterRoom($('new-room').value);
  $('new-room').value = '';
  $('text').focus();
};

function grow() {
  const text = $('text');
  text.style.height = 'auto';
  text.style.height = `${Math.min(160, text.scrollHeight + 2)}px`;
}

$('say').onsubmit = (event) => {
  event.preventDefault();
  const text = $('text').value.trim();
  if (!text || !current) return;
  say(text);
  $('text').value = '';
  grow();
};
$('text').oninput = grow;
$('text').onkeydown = (event) => {
  if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) { event.preventDefault(); $('say').requestSubmit(); }
};
$('newest').onclick = () => { $('log').scrollTop = $('log').scrollHeight; $('newest').hidden = true; };
let atEnd = true;
$('log').onscroll = () => {
  const log = $('log');
  atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  if (atEnd) $('newest').hidden = true;
};
// A banner, the keyboard or a turned phone must not push the newest message out of sight.
new ResizeObserver(() => { if (atEnd) $('log').scrollTop = $('log').scrollHeight; }).observe($('log'));

try { $('name').value = localStorage.getItem('name') ?? ''; } catch { /* a private window */ }
$('name').focus();
