#!/usr/bin/env bash
# The picture of a report: from the root of the project, with Chromium installed.
set -euo pipefail
page="$(mktemp --directory)/gpt2.html"
autopar plan gpt2 --inputs batch=16,seq=512 --mesh 4 --parallel fsdp --budget 5GiB --beside --quiet --report "$page" > /dev/null
chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --virtual-time-budget=5000 --window-size=1240,1560 \
  --screenshot=docs/pictures/report.png "file://$page"
