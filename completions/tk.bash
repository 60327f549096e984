# bash completion for tk; made by `make docs`. Install: tk completion bash --install

# Sets flags, places and rest (what can stand where no flag does: first, second, ...; and ever after) of the command in
# $path, and the kind of value that the flag $1 takes: words, @FILE, @MODEL, @NAME, @ANY, or nothing when it takes none.
_tk_table() {
    flags= kind= places=() rest=
    case "$path" in
        "tk")
            flags="--version -h --help"
            places=("serve chat run bench top models pull show rm config doctor collect-env man completion")
            ;;
        "tk serve")
            flags="--model --revision --tokenizer --chat-template --dtype --max-model-len --load-format --quantization --pooling --seed --host --port --uds --root-path --served-model-name --api-key --api-key-file --admin-key --ssl-keyfile --ssl-certfile --ssl-ca-certs --allowed-origins --allowed-methods --allowed-headers --allow-credentials --no-allow-credentials --forwarded-allow-ips --max-queue --max-queue-tokens --max-requests-per-key --requests-per-minute --request-timeout --shutdown-timeout --api-workers --strict --no-strict --trust-request-chat-template --no-trust-request-chat-template --allow-special-tokens-in-messages --no-allow-special-tokens-in-messages --tool-call-parser --reasoning-parser --sse-keep-alive --metrics-prefix --log-level --log-format --disable-log-requests --no-disable-log-requests --disable-log-stats --no-disable-log-stats --uvicorn-log-level --disable-uvicorn-access-log --no-disable-uvicorn-access-log --otlp-traces-endpoint --device --attention-backend --enforce-eager --no-enforce-eager --num-threads --block-size --gpu-memory-utilization --kv-cache-memory --kv-cache-dtype --num-gpu-blocks-override --swap-space --enable-prefix-caching --no-enable-prefix-caching --max-num-seqs --max-num-batched-tokens --scheduling-policy --async-scheduling --no-async-scheduling --tensor-parallel-size --pipeline-parallel-size --data-parallel-size --distributed-executor-backend --worker-timeout --dry-run --no-dry-run --json --no-json --config --help-all -h --help"
            places=("@MODEL")
            case "$1" in
                --model|--tokenizer) kind="@MODEL" ;;
                --revision|--max-model-len|--seed|--host|--port|--root-path|--served-model-name|--api-key|--admin-key|--allowed-origins|--allowed-methods|--allowed-headers|--forwarded-allow-ips|--max-queue|--max-queue-tokens|--max-requests-per-key|--requests-per-minute|--request-timeout|--shutdown-timeout|--api-workers|--sse-keep-alive|--metrics-prefix|--otlp-traces-endpoint|--num-threads|--block-size|--gpu-memory-utilization|--kv-cache-memory|--num-gpu-blocks-override|--swap-space|--max-num-seqs|--max-num-batched-tokens|--tensor-parallel-size|--pipeline-parallel-size|--data-parallel-size|--worker-timeout) kind="@ANY" ;;
                --chat-template|--uds|--api-key-file|--ssl-keyfile|--ssl-certfile|--ssl-ca-certs|--config) kind="@FILE" ;;
                --dtype) kind="auto float32 bfloat16 float16" ;;
                --load-format) kind="auto safetensors dummy" ;;
                --quantization) kind="fp8 int8" ;;
                --pooling) kind="last mean cls" ;;
                --tool-call-parser) kind="auto none hermes llama3_json mistral" ;;
                --reasoning-parser) kind="none qwen3 deepseek_r1" ;;
                --log-level|--uvicorn-log-level) kind="debug info warning error" ;;
                --log-format) kind="auto text json" ;;
                --device) kind="auto cuda cpu" ;;
                --attention-backend) kind="auto torch cpu triton flash" ;;
                --kv-cache-dtype) kind="auto fp8" ;;
                --scheduling-policy) kind="fcfs priority" ;;
                --distributed-executor-backend) kind="mp ray" ;;
            esac
            ;;
        "tk chat")
            flags="--model --prompt --url --base-url --api-key --system -c --resume --continue --no-resume --temperature --max-tokens --top-p --seed --tools --schema --json --no-json --stream --no-stream --reasoning --config --help-all -h --help"
            places=("@MODEL" "@ANY")
            case "$1" in
                --model) kind="@MODEL" ;;
                --prompt|--url|--base-url|--api-key|--system|--temperature|--max-tokens|--top-p|--seed) kind="@ANY" ;;
                --tools|--schema|--config) kind="@FILE" ;;
                --reasoning) kind="short full hidden" ;;
            esac
            ;;
        "tk run")
            flags="--model --revision --tokenizer --chat-template --dtype --max-model-len --load-format --quantization --pooling --seed --prompt --system --max-tokens --temperature --top-p --raw --no-raw --device --attention-backend --enforce-eager --no-enforce-eager --num-threads --block-size --gpu-memory-utilization --kv-cache-memory --kv-cache-dtype --num-gpu-blocks-override --swap-space --enable-prefix-caching --no-enable-prefix-caching --max-num-seqs --max-num-batched-tokens --scheduling-policy --async-scheduling --no-async-scheduling --tensor-parallel-size --pipeline-parallel-size --data-parallel-size --distributed-executor-backend --worker-timeout --config --help-all -h --help"
            places=("@MODEL" "@ANY")
            case "$1" in
                --model|--tokenizer) kind="@MODEL" ;;
                --revision|--max-model-len|--seed|--prompt|--system|--max-tokens|--temperature|--top-p|--num-threads|--block-size|--gpu-memory-utilization|--kv-cache-memory|--num-gpu-blocks-override|--swap-space|--max-num-seqs|--max-num-batched-tokens|--tensor-parallel-size|--pipeline-parallel-size|--data-parallel-size|--worker-timeout) kind="@ANY" ;;
                --chat-template|--config) kind="@FILE" ;;
                --dtype) kind="auto float32 bfloat16 float16" ;;
                --load-format) kind="auto safetensors dummy" ;;
                --quantization) kind="fp8 int8" ;;
                --pooling) kind="last mean cls" ;;
                --device) kind="auto cuda cpu" ;;
                --attention-backend) kind="auto torch cpu triton flash" ;;
                --kv-cache-dtype) kind="auto fp8" ;;
                --scheduling-policy) kind="fcfs priority" ;;
                --distributed-executor-backend) kind="mp ray" ;;
            esac
            ;;
        "tk bench")
            flags="--url --base-url --model --endpoint --api-key --header --ready-check-timeout-sec --request-rate --rps --burstiness --burst-size --ramp-up-strategy --ramp-up-start-rps --ramp-up-end-rps --num-prompts --duration --max-concurrency --clients --find-max-rps --no-find-max-rps --dataset-name --dataset-path --random-input-len --random-output-len --random-range-ratio --random-vocab-size --prefix-len --num-prefixes --output-len --ignore-eos --no-ignore-eos --seed --num-warmups --goodput --goodput-ratio --percentile-metrics --metric-percentiles --json --no-json --save-result --no-save-result --result-dir --result-filename --metadata --config --help-all -h --help"
            places=("serve sweep compare offline latency prefill")
            case "$1" in
                --url|--base-url|--api-key|--header|--ready-check-timeout-sec|--request-rate|--rps|--burstiness|--burst-size|--ramp-up-start-rps|--ramp-up-end-rps|--num-prompts|--duration|--max-concurrency|--clients|--random-input-len|--random-output-len|--random-range-ratio|--random-vocab-size|--prefix-len|--num-prefixes|--output-len|--seed|--num-warmups|--goodput|--goodput-ratio|--percentile-metrics|--metric-percentiles|--metadata) kind="@ANY" ;;
                --model|--result-filename) kind="@NAME" ;;
                --endpoint) kind="completions chat /v1/completions /v1/chat/completions" ;;
                --ramp-up-strategy) kind="linear exponential" ;;
                --dataset-name) kind="random prefix sharegpt custom trace" ;;
                --dataset-path|--result-dir|--config) kind="@FILE" ;;
            esac
            ;;
        "tk bench serve")
            flags="--url --base-url --model --endpoint --api-key --header --ready-check-timeout-sec --request-rate --rps --burstiness --burst-size --ramp-up-strategy --ramp-up-start-rps --ramp-up-end-rps --num-prompts --duration --max-concurrency --clients --find-max-rps --no-find-max-rps --dataset-name --dataset-path --random-input-len --random-output-len --random-range-ratio --random-vocab-size --prefix-len --num-prefixes --output-len --ignore-eos --no-ignore-eos --seed --num-warmups --goodput --goodput-ratio --percentile-metrics --metric-percentiles --json --no-json --save-result --no-save-result --result-dir --result-filename --metadata --config --help-all -h --help"
            case "$1" in
                --url|--base-url|--api-key|--header|--ready-check-timeout-sec|--request-rate|--rps|--burstiness|--burst-size|--ramp-up-start-rps|--ramp-up-end-rps|--num-prompts|--duration|--max-concurrency|--clients|--random-input-len|--random-output-len|--random-range-ratio|--random-vocab-size|--prefix-len|--num-prefixes|--output-len|--seed|--num-warmups|--goodput|--goodput-ratio|--percentile-metrics|--metric-percentiles|--metadata) kind="@ANY" ;;
                --model|--result-filename) kind="@NAME" ;;
                --endpoint) kind="completions chat /v1/completions /v1/chat/completions" ;;
                --ramp-up-strategy) kind="linear exponential" ;;
                --dataset-name) kind="random prefix sharegpt custom trace" ;;
                --dataset-path|--result-dir|--config) kind="@FILE" ;;
            esac
            ;;
        "tk bench sweep")
            flags="--url --base-url --model --endpoint --api-key --header --ready-check-timeout-sec --request-rate --rps --burstiness --burst-size --ramp-up-strategy --ramp-up-start-rps --ramp-up-end-rps --num-prompts --duration --max-concurrency --clients --find-max-rps --no-find-max-rps --dataset-name --dataset-path --random-input-len --random-output-len --random-range-ratio --random-vocab-size --prefix-len --num-prefixes --output-len --ignore-eos --no-ignore-eos --seed --num-warmups --goodput --goodput-ratio --percentile-metrics --metric-percentiles --json --no-json --save-result --no-save-result --result-dir --result-filename --metadata --vary --config --help-all -h --help"
            case "$1" in
                --url|--base-url|--api-key|--header|--ready-check-timeout-sec|--request-rate|--rps|--burstiness|--burst-size|--ramp-up-start-rps|--ramp-up-end-rps|--num-prompts|--duration|--max-concurrency|--clients|--random-input-len|--random-output-len|--random-range-ratio|--random-vocab-size|--prefix-len|--num-prefixes|--output-len|--seed|--num-warmups|--goodput|--goodput-ratio|--percentile-metrics|--metric-percentiles|--metadata|--vary) kind="@ANY" ;;
                --model|--result-filename) kind="@NAME" ;;
                --endpoint) kind="completions chat /v1/completions /v1/chat/completions" ;;
                --ramp-up-strategy) kind="linear exponential" ;;
                --dataset-name) kind="random prefix sharegpt custom trace" ;;
                --dataset-path|--result-dir|--config) kind="@FILE" ;;
            esac
            ;;
        "tk bench compare")
            flags="--before --after --threshold --json --no-json --config --help-all -h --help"
            places=("@ANY" "@ANY")
            case "$1" in
                --before|--after|--threshold) kind="@ANY" ;;
                --config) kind="@FILE" ;;
            esac
            ;;
        "tk bench offline")
            flags="--temperature --repeats --profile --json --no-json --num-prompts --min-len --max-len --model --revision --tokenizer --chat-template --dtype --max-model-len --load-format --quantization --pooling --seed --device --attention-backend --enforce-eager --no-enforce-eager --num-threads --block-size --gpu-memory-utilization --kv-cache-memory --kv-cache-dtype --num-gpu-blocks-override --swap-space --enable-prefix-caching --no-enable-prefix-caching --max-num-seqs --max-num-batched-tokens --scheduling-policy --async-scheduling --no-async-scheduling --tensor-parallel-size --pipeline-parallel-size --data-parallel-size --distributed-executor-backend --worker-timeout --config --help-all -h --help"
            places=("@MODEL")
            case "$1" in
                --temperature|--repeats|--num-prompts|--min-len|--max-len|--revision|--max-model-len|--seed|--num-threads|--block-size|--gpu-memory-utilization|--kv-cache-memory|--num-gpu-blocks-override|--swap-space|--max-num-seqs|--max-num-batched-tokens|--tensor-parallel-size|--pipeline-parallel-size|--data-parallel-size|--worker-timeout) kind="@ANY" ;;
                --profile|--chat-template|--config) kind="@FILE" ;;
                --model|--tokenizer) kind="@MODEL" ;;
                --dtype) kind="auto float32 bfloat16 float16" ;;
                --load-format) kind="auto safetensors dummy" ;;
                --quantization) kind="fp8 int8" ;;
                --pooling) kind="last mean cls" ;;
                --device) kind="auto cuda cpu" ;;
                --attention-backend) kind="auto torch cpu triton flash" ;;
                --kv-cache-dtype) kind="auto fp8" ;;
                --scheduling-policy) kind="fcfs priority" ;;
                --distributed-executor-backend) kind="mp ray" ;;
            esac
            ;;
        "tk bench latency")
            flags="--temperature --repeats --profile --json --no-json --batch-sizes --input-len --output-len --model --revision --tokenizer --chat-template --dtype --max-model-len --load-format --quantization --pooling --seed --device --attention-backend --enforce-eager --no-enforce-eager --num-threads --block-size --gpu-memory-utilization --kv-cache-memory --kv-cache-dtype --num-gpu-blocks-override --swap-space --enable-prefix-caching --no-enable-prefix-caching --max-num-seqs --max-num-batched-tokens --scheduling-policy --async-scheduling --no-async-scheduling --tensor-parallel-size --pipeline-parallel-size --data-parallel-size --distributed-executor-backend --worker-timeout --config --help-all -h --help"
            places=("@MODEL")
            case "$1" in
                --temperature|--repeats|--batch-sizes|--input-len|--output-len|--revision|--max-model-len|--seed|--num-threads|--block-size|--gpu-memory-utilization|--kv-cache-memory|--num-gpu-blocks-override|--swap-space|--max-num-seqs|--max-num-batched-tokens|--tensor-parallel-size|--pipeline-parallel-size|--data-parallel-size|--worker-timeout) kind="@ANY" ;;
                --profile|--chat-template|--config) kind="@FILE" ;;
                --model|--tokenizer) kind="@MODEL" ;;
                --dtype) kind="auto float32 bfloat16 float16" ;;
                --load-format) kind="auto safetensors dummy" ;;
                --quantization) kind="fp8 int8" ;;
                --pooling) kind="last mean cls" ;;
                --device) kind="auto cuda cpu" ;;
                --attention-backend) kind="auto torch cpu triton flash" ;;
                --kv-cache-dtype) kind="auto fp8" ;;
                --scheduling-policy) kind="fcfs priority" ;;
                --distributed-executor-backend) kind="mp ray" ;;
            esac
            ;;
        "tk bench prefill")
            flags="--temperature --repeats --profile --json --no-json --num-prompts --input-len --model --revision --tokenizer --chat-template --dtype --max-model-len --load-format --quantization --pooling --seed --device --attention-backend --enforce-eager --no-enforce-eager --num-threads --block-size --gpu-memory-utilization --kv-cache-memory --kv-cache-dtype --num-gpu-blocks-override --swap-space --enable-prefix-caching --no-enable-prefix-caching --max-num-seqs --max-num-batched-tokens --scheduling-policy --async-scheduling --no-async-scheduling --tensor-parallel-size --pipeline-parallel-size --data-parallel-size --distributed-executor-backend --worker-timeout --config --help-all -h --help"
            places=("@MODEL")
            case "$1" in
                --temperature|--repeats|--num-prompts|--input-len|--revision|--max-model-len|--seed|--num-threads|--block-size|--gpu-memory-utilization|--kv-cache-memory|--num-gpu-blocks-override|--swap-space|--max-num-seqs|--max-num-batched-tokens|--tensor-parallel-size|--pipeline-parallel-size|--data-parallel-size|--worker-timeout) kind="@ANY" ;;
                --profile|--chat-template|--config) kind="@FILE" ;;
                --model|--tokenizer) kind="@MODEL" ;;
                --dtype) kind="auto float32 bfloat16 float16" ;;
                --load-format) kind="auto safetensors dummy" ;;
                --quantization) kind="fp8 int8" ;;
                --pooling) kind="last mean cls" ;;
                --device) kind="auto cuda cpu" ;;
                --attention-backend) kind="auto torch cpu triton flash" ;;
                --kv-cache-dtype) kind="auto fp8" ;;
                --scheduling-policy) kind="fcfs priority" ;;
                --distributed-executor-backend) kind="mp ray" ;;
            esac
            ;;
        "tk top")
            flags="--url --base-url --api-key --admin-key --demo --no-demo --interval --window --theme --once --no-once --json --no-json --record --replay --config --help-all -h --help"
            rest="@ANY"
            case "$1" in
                --url|--base-url|--api-key|--admin-key|--interval|--window) kind="@ANY" ;;
                --theme) kind="auto dark light" ;;
                --record|--replay|--config) kind="@FILE" ;;
            esac
            ;;
        "tk models")
            flags="--json -h --help"
            rest="@FILE"
            ;;
        "tk pull")
            flags="--revision -h --help"
            places=("@ANY")
            case "$1" in
                --revision) kind="@ANY" ;;
            esac
            ;;
        "tk show")
            flags="--revision --json -h --help"
            places=("@MODEL")
            case "$1" in
                --revision) kind="@ANY" ;;
            esac
            ;;
        "tk rm")
            flags="-y --yes -h --help"
            rest="@DOWNLOADED"
            ;;
        "tk config")
            flags="-h --help"
            places=("show")
            ;;
        "tk config show")
            flags="--command --origin --config --json -h --help"
            case "$1" in
                --command) kind="serve chat run bench sweep compare offline latency prefill top models pull show rm config doctor collect-env man completion tk.toml metrics" ;;
                --config) kind="@FILE" ;;
            esac
            ;;
        "tk doctor")
            flags="--json -h --help"
            ;;
        "tk collect-env")
            flags="-h --help"
            ;;
        "tk man")
            flags="-h --help"
            rest="serve chat run bench sweep compare offline latency prefill top models pull show rm config doctor collect-env man completion tk.toml metrics"
            ;;
        "tk completion")
            flags="--install -h --help"
            places=("bash zsh fish")
            ;;
    esac
}

# The words up to the cursor as they were typed: readline parts them at colons and equals signs, too.
_tk_words() {
    local line=${COMP_LINE:0:COMP_POINT} gap word i
    line=${line#*"${COMP_WORDS[0]}"}
    words=("${COMP_WORDS[0]}")
    for ((i = 1; i <= COMP_CWORD; i++)); do
        gap=${line%%[![:space:]]*}
        line=${line#"$gap"}
        word=${COMP_WORDS[i]}
        ((i == COMP_CWORD)) && word=$line
        line=${line#"$word"}
        if [[ -n $gap ]]; then
            words+=("$word")
        else
            words[${#words[@]} - 1]+=$word
        fi
    done
}

# Offers those of the lines in $1 that begin with $cur.
_tk_offer() {
    local one
    while IFS= read -r one; do
        [[ -n $one && $one == "$cur"* ]] && COMPREPLY+=("$before$one")
    done <<<"$1"
}

_tk() {
    local words path=tk flags kind places rest flag= before= place=0 i=1 newline=$'\n'
    COMPREPLY=()
    _tk_words
    local last=$((${#words[@]} - 1))
    local cur=${words[last]}
    while ((i < last)); do
        case "$path ${words[i]}" in
            "tk serve"|"tk chat"|"tk run"|"tk bench"|"tk bench serve"|"tk bench sweep"|"tk bench compare"|"tk bench offline"|"tk bench latency"|"tk bench prefill"|"tk top"|"tk models"|"tk pull"|"tk show"|"tk rm"|"tk config"|"tk config show"|"tk doctor"|"tk collect-env"|"tk man"|"tk completion") path+=" ${words[i]}" ;;
            *) break ;;
        esac
        ((i++))
    done
    for (( ; i < last; i++)); do
        if [[ -n $flag ]]; then
            flag=
        elif [[ ${words[i]} == -* ]]; then
            _tk_table "${words[i]}"
            [[ -n $kind ]] && flag=${words[i]}
        else
            ((place++))
        fi
    done
    if [[ -z $flag && $cur == --*=* ]]; then
        flag=${cur%%=*} before=${cur%%=*}= cur=${cur#*=}
    fi
    _tk_table "$flag"
    if [[ -z $flag && $cur == -* ]]; then
        kind=$flags
    elif [[ -z $flag ]]; then
        kind=${places[place]-$rest}
    fi
    case $kind in
        @FILE)
            compopt -o filenames 2>/dev/null
            _tk_offer "$(compgen -f -- "$cur")"
            ;;
        @MODEL | @NAME | @DOWNLOADED)
            if [[ $kind == @MODEL && $cur == [./~]* ]]; then
                compopt -o filenames 2>/dev/null
                _tk_offer "$(compgen -d -- "$cur")"
            else
                _tk_offer "$(command "${words[0]}" __values "${kind#@}" "${words[@]:1:last-1}" 2>/dev/null)"
            fi
            ;;
        @ANY) ;;
        *) _tk_offer "${kind// /$newline}" ;;
    esac
    # readline replaces only what follows the last colon or equals sign
    local breaks=${COMP_WORDBREAKS//[!:=]/} typed=$before$cur
    if [[ -n $breaks && ${#COMPREPLY[@]} -gt 0 ]]; then
        typed=${typed%"${typed##*[$breaks]}"}
        COMPREPLY=("${COMPREPLY[@]#"$typed"}")
    fi
}

complete -F _tk tk
