#!/bin/sh
# Starts five nodes on this machine, lets two of them talk, and stops them all (Ctrl-C: earlier).
# `examples/five.sh 60` keeps them for a minute. Meanwhile, in another terminal:
#   cargo run --features tcp --example node -- --id me --listen 127.0.0.1:0 --seed 127.0.0.1:7001
set -eu
cd "$(dirname "$0")/.."
cargo build --quiet --features tcp --example node
node=${CARGO_TARGET_DIR:-target}/debug/examples/node
for n in 1 2 3 4 5; do
    {
        echo 'join lobby'
        sleep 3
        [ $n -gt 2 ] || echo "say lobby hello from n$n"
        sleep 1
        [ $n -ne 1 ] || echo members
        sleep "${1:-1}"
        echo quit
    } | "$node" --id "n$n" --listen "127.0.0.1:700$n" --seed 127.0.0.1:7001 | sed "s/^/n$n  /" &
done
wait
