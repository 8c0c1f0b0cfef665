#!/bin/sh
# Stands in for a pod's Python where a test is about pods, not about training: a "DHT" that prints an address and a
# "peer" that says that it is in epoch 1, each of which then does nothing until it is ended.
[ "$1" = -c ] && exit 0
case "$4" in
  start)
    mkdir -p state/coordinator
    (umask 077
    echo "diloco-admission1.stand.in" >state/coordinator/diloco.admission-key
    echo "diloco1.stand.in" >state/coordinator/diloco.swarm-secret)
    echo "--initial-peers /ip4/127.0.0.1/tcp/1/p2p/12D3KooWHMXMfxzB2bW1hADjf1JAuC8oCiCpB1mtKpS8y6N1QwMW"
    ;;
  *)
    [ -s swarm-secret ] || exit 2
    mkdir -p runs/peer
    echo '{"kind":"epoch","epoch":1,"step":5}' >>runs/peer/metrics.jsonl
    ;;
esac
exec sleep 1000000
