#!/usr/bin/env bash
# Plain HTTP against `headrace serve`: examples/curl.sh [URL]
set -euo pipefail
url=${1:-http://127.0.0.1:8000}

curl -sSf "$url/ready"
echo

curl -sSf "$url/v1/chat/completions" -H 'content-type: application/json' -d '{
  "messages": [{"role": "user", "content": "Why do rivers flow?"}],
  "max_tokens": 40, "temperature": 0
}'
echo

curl -sSfN "$url/v1/completions" -H 'content-type: application/json' -d '{
  "prompt": "Water boils at", "max_tokens": 8, "temperature": 0, "stream": true
}'
