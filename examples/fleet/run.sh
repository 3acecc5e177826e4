#!/usr/bin/env bash
# A control plane and three devices on this machine: keys, a signed policy, a rollout in two stages.
# run.sh FOLDER: everything is written into FOLDER, which must be new. The programs end with the script.
set -euo pipefail
example=$(cd "$(dirname "$0")" && pwd)
work=${1:?run.sh FOLDER}
mkdir "$work"
mkdir "$work/fleet"
cp -r "$example"/{fleet.yaml,trust.yaml,policies} "$work/fleet"
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT

ready() { # the URL of a program, once its output FILE has the line "ready url=…"
  for _ in $(seq 120); do
    if grep -q '^ready ' "$1"; then sed -n 's/^ready .*url=\([^ ]*\).*/\1/p' "$1" | sed 's,/v1$,,'; return; fi
    sleep 0.5
  done
  echo "not ready: see $1" >&2
  return 1
}

# Two people sign what devices run; the server's key says which devices run it.
for name in anna ben server; do causeway-fleet keys new "$name" --keys "$work/fleet/keys"; done
causeway-fleet test "$work/fleet"
causeway-fleet sign "$work/fleet" --key "$work/fleet/keys/anna.pem" --key "$work/fleet/keys/ben.pem" \
  --key "$work/fleet/keys/server.pem"

causeway-fleet serve "$work/fleet" --keys "$work/fleet/keys" --state-dir "$work/server" --listen 127.0.0.1:0 \
  > "$work/server.out" 2> "$work/server.log" &
CAUSEWAY_FLEET_URL=$(ready "$work/server.out")
CAUSEWAY_FLEET_TOKEN=$(cat "$work/server/bootstrap-token")
export CAUSEWAY_FLEET_URL CAUSEWAY_FLEET_TOKEN
echo "the console: $CAUSEWAY_FLEET_URL/console, token in $work/server/bootstrap-token"

causeway-fleet enroll --cohort kiosks --uses 3 --expires 1h > "$work/join-token"
for number in 1 2 3; do
  causeway-edge fleet join "$CAUSEWAY_FLEET_URL" --name "kiosk-$number" --site corner \
    --state-dir "$work/device-$number" < "$work/join-token"
  causeway-edge serve --state-dir "$work/device-$number" --set server.port=0 --set server.socket= \
    --set engine.threads=1 --set engine.sequences=1 \
    --set fleet.trial_s=2s --set fleet.trial_requests=0 --set fleet.telemetry_interval_s=2s \
    > "$work/device-$number.out" 2> "$work/device-$number.log" &
done
# The application on each device: a question a second. A device without requests reports too rarely for these stages.
question='{"model": "auto", "messages": [{"role": "user", "content": "wake me up at six am"}]}'
for number in 1 2 3; do
  url=$(ready "$work/device-$number.out")
  echo "kiosk-$number: $url"
  while sleep 1; do
    curl -s -o /dev/null -H 'content-type: application/json' -d "$question" "$url/v1/chat/completions" || true
  done &
done

causeway-fleet apply "$work/fleet" --cohort kiosks --without-replay --yes
for _ in $(seq 120); do
  state=$(causeway-fleet status kiosks --format json | jq -r .state)
  case $state in
    done) break ;;
    # So few devices allow no verdict: a person accepts the stage.
    paused) causeway-fleet accept kiosks --reason "three devices" ;;
    reverted | draft) break ;;
  esac
  sleep 1
done
causeway-fleet status kiosks
for number in 1 2 3; do
  CAUSEWAY_URL=$(ready "$work/device-$number.out") causeway-edge ask "wake me up at six am"
done
[ "$state" = done ]
