"""Flags of vLLM, in the spelling of `toolkit.config.vllm`: --switch, --one=, --several=..."""

from __future__ import annotations

SERVE = """
    --headless --api-server-count= -asc= --config= --grpc --lora-modules=...
    --chat-template= --chat-template-content-format= --trust-request-chat-template
    --no-trust-request-chat-template --trust-request-mm-kwargs --no-trust-request-mm-kwargs
    --default-chat-template-kwargs= --reasoning-effort-map= --response-role=
    --return-tokens-as-token-ids --no-return-tokens-as-token-ids --enable-auto-tool-choice
    --disable-auto-tool-choice --exclude-tools-when-tool-choice-none
    --no-exclude-tools-when-tool-choice-none --tool-call-parser= --tool-parser-plugin=
    --tool-strict-level= --tool-server= --max-log-len= --enable-prompt-tokens-details
    --disable-prompt-tokens-details --enable-per-request-metrics --disable-per-request-metrics
    --enable-server-load-tracking --disable-server-load-tracking --enable-force-include-usage
    --disable-force-include-usage --sse-keep-alive-interval= --enable-tokenizer-info-endpoint
    --disable-tokenizer-info-endpoint --enable-log-outputs --disable-log-outputs
    --enable-log-deltas --disable-log-deltas --cohere-is-reasoning-model
    --no-cohere-is-reasoning-model --cohere-format= --anthropic-disabled-thinking-effort=
    --log-error-stack --no-log-error-stack --tokens-only --no-tokens-only --enable-scale-out
    --disable-scale-out --fingerprint-mode= --fingerprint-value= --host= --port= --grpc-port=
    --data-parallel-supervisor-port= --dp-supervisor-probe-interval-s=
    --dp-supervisor-probe-timeout-s= --dp-supervisor-probe-failure-threshold= --uds=
    --uvicorn-log-level= --disable-uvicorn-access-log --enable-uvicorn-access-log
    --disable-access-log-for-endpoints= --allow-credentials --no-allow-credentials
    --allowed-origins= --allowed-methods= --allowed-headers= --api-key=... --ssl-keyfile=
    --ssl-certfile= --ssl-ca-certs= --enable-ssl-refresh --disable-ssl-refresh --ssl-cert-reqs=
    --ssl-ciphers= --root-path= --middleware= --enable-request-id-headers
    --disable-request-id-headers --disable-fastapi-docs --enable-fastapi-docs
    --h11-max-incomplete-event-size= --h11-max-header-count= --enable-offline-docs
    --disable-offline-docs --enable-flash-late-interaction --disable-flash-late-interaction
    --model= --runner= --convert= --tokenizer= --tokenizer-mode= --trust-remote-code
    --no-trust-remote-code --dtype= --seed= --hf-config-path= --allowed-local-media-path=
    --allowed-media-domains=... --revision= --code-revision= --tokenizer-revision=
    --max-model-len= --quantization= -q= --quantization-config= --allow-deprecated-quantization
    --no-allow-deprecated-quantization --enforce-eager --no-enforce-eager
    --enable-return-routed-experts --disable-return-routed-experts --return-sampling-mask
    --no-return-sampling-mask --max-logprobs= --logprobs-mode= --use-fp64-gumbel
    --no-use-fp64-gumbel --enable-trace-replay --disable-trace-replay --disable-sliding-window
    --enable-sliding-window --disable-cascade-attn --enable-cascade-attn --skip-tokenizer-init
    --no-skip-tokenizer-init --enable-prompt-embeds --disable-prompt-embeds
    --served-model-name=... --config-format= --hf-token= --hf-overrides= --model-class-overrides=
    --pooler-config= --generation-config= --override-generation-config= --enable-sleep-mode
    --disable-sleep-mode --sleep-mode-backend= --sleep-mode-offload-cudagraph
    --no-sleep-mode-offload-cudagraph --sleep-preserve-parameter-names=...
    --enable-cumem-allocator --disable-cumem-allocator --enable-nccl-comm-suspend
    --disable-nccl-comm-suspend --model-impl= --logits-processors=... --io-processor-plugin=
    --renderer-num-workers= --load-format= --download-dir= --safetensors-load-strategy=
    --safetensors-prefetch-num-threads= --safetensors-prefetch-block-size=
    --model-loader-extra-config= --ignore-patterns=... --use-tqdm-on-load --no-use-tqdm-on-load
    --pt-load-map-location= --attention-backend= --mamba-backend= --mamba-ssu-algorithm=
    --enable-mamba-cache-stochastic-rounding --disable-mamba-cache-stochastic-rounding
    --mamba-cache-philox-rounds= --reasoning-parser= --reasoning-parser-plugin=
    --distributed-executor-backend= --pipeline-parallel-size= -pp= --master-addr= --master-port=
    --nnodes= -n= --node-rank= -r= --distributed-timeout-seconds=
    --cpu-distributed-timeout-seconds= --numa-bind --no-numa-bind --numa-bind-nodes=...
    --numa-bind-cpus=... --device-ids= --tensor-parallel-size= -tp=
    --decode-context-parallel-size= -dcp= --dcp-comm-backend= --dcp-q-replicate
    --no-dcp-q-replicate --dcp-kv-cache-interleave-size= --cp-kv-cache-interleave-size=
    --prefill-context-parallel-size= -pcp= --data-parallel-size= -dp= --data-parallel-rank= -dpn=
    --data-parallel-start-rank= -dpr= --data-parallel-size-local= -dpl= --data-parallel-address=
    -dpa= --data-parallel-rpc-port= -dpp= --data-parallel-backend= -dpb= --data-parallel-hybrid-lb
    --no-data-parallel-hybrid-lb -dph --data-parallel-external-lb --no-data-parallel-external-lb
    -dpe --data-parallel-multi-port-external-lb -dpm --enable-hc-sp --disable-hc-sp
    --enable-expert-parallel -ep --disable-expert-parallel --enable-batch-sharded-sampling
    --disable-batch-sharded-sampling --enable-ep-weight-filter --disable-ep-weight-filter
    --all2all-backend= --enable-dbo --disable-dbo --enable-shm-tensor-arena
    --disable-shm-tensor-arena --ubatch-size= --enable-elastic-ep --disable-elastic-ep
    --elastic-ep-max-dp-size= --dbo-decode-token-threshold= --dp-sync-interval=
    --dbo-prefill-token-threshold= --disable-nccl-for-dp-synchronization
    --enable-nccl-for-dp-synchronization --enable-eplb --disable-eplb --eplb-config=
    --expert-placement-strategy= --max-parallel-loading-workers= --ray-workers-use-nsight
    --no-ray-workers-use-nsight --disable-custom-all-reduce --enable-custom-all-reduce
    --worker-cls= --worker-extension-cls= --enable-fault-tolerance --disable-fault-tolerance
    --fault-tolerance-config= --block-size= --gpu-memory-utilization= --device-memory-utilization=
    --kv-cache-memory-bytes= --kv-cache-dtype= --num-gpu-blocks-override= --enable-prefix-caching
    --disable-prefix-caching --prefix-caching-hash-algo= --prefix-cache-retention-interval=
    --kv-cache-dtype-skip-layers=... --kv-sharing-fast-prefill --no-kv-sharing-fast-prefill
    --swa-bounded-replay --no-swa-bounded-replay --mamba-cache-dtype= --mamba-ssm-cache-dtype=
    --mamba-block-size= --prefix-match-unit= --mamba-cache-mode=
    --enable-mamba-shared-prefix-checkpoint --disable-mamba-shared-prefix-checkpoint
    --replayssm-buffer-len= --use-replayssm --no-use-replayssm --kv-offloading-size=
    --kv-offloading-backend= --offload-backend= --cpu-offload-gb= --cpu-offload-params=...
    --offload-group-size= --offload-num-in-group= --offload-prefetch-step= --offload-params=...
    --language-model-only --no-language-model-only --limit-mm-per-prompt= --enable-mm-embeds
    --disable-mm-embeds --media-io-kwargs= --mm-processor-kwargs= --mm-processor-cache-gb=
    --mm-processor-cache-type= --mm-hasher-algorithm= --mm-shm-cache-max-object-size-mb=
    --mm-encoder-only --no-mm-encoder-only --mm-encoder-tp-mode= --mm-encoder-attn-backend=
    --mm-encoder-attn-dtype= --mm-encoder-fp8-scale-path= --mm-encoder-fp8-scale-save-path=
    --mm-encoder-fp8-scale-save-margin= --interleave-mm-strings --no-interleave-mm-strings
    --skip-mm-profiling --no-skip-mm-profiling --video-pruning-rate= --video-pruning-method=
    --mm-tensor-ipc= --mm-processor-device= --mm-ipc-gpu-memory-gb= --mm-device-do-normalize
    --no-mm-device-do-normalize --enable-lora --disable-lora --max-loras= --max-lora-rank=
    --lora-dtype= --enable-tower-connector-lora --disable-tower-connector-lora --max-cpu-loras=
    --fully-sharded-loras --no-fully-sharded-loras --lora-target-modules=... --default-mm-loras=
    --specialize-active-lora --no-specialize-active-lora --enable-mixed-moe-lora-format
    --disable-mixed-moe-lora-format --enable-moe-shared-loras --disable-moe-shared-loras
    --max-lora-cls-labels= --logging-config= --log-level= --log-config-file=
    --show-hidden-metrics-for-version= --otlp-traces-endpoint= --collect-detailed-traces=...
    --per-request-spec-decode-metrics= --kv-cache-metrics --no-kv-cache-metrics
    --kv-cache-metrics-sample= --custom-histogram-buckets= --cudagraph-metrics
    --no-cudagraph-metrics --enable-layerwise-nvtx-tracing --disable-layerwise-nvtx-tracing
    --enable-mfu-metrics --disable-mfu-metrics --enable-logging-iteration-details
    --disable-logging-iteration-details --jit-monitor-mode= --jit-monitor-verbose
    --no-jit-monitor-verbose --max-num-batched-tokens= --max-num-scheduled-tokens= --max-num-seqs=
    --max-num-active-seqs= --max-num-queued-reqs= --max-num-queued-tokens=
    --long-prefill-token-threshold= --long-prefill-token-threshold-adaptive
    --no-long-prefill-token-threshold-adaptive --scheduling-policy= --enable-chunked-prefill
    --disable-chunked-prefill --disable-chunked-mm-input --enable-chunked-mm-input
    --scheduler-cls= --scheduler-reserve-full-isl --no-scheduler-reserve-full-isl --watermark=
    --prefill-schedule-interval= --disable-hybrid-kv-cache-manager
    --enable-hybrid-kv-cache-manager --async-scheduling --no-async-scheduling --stream-interval=
    --cudagraph-capture-sizes=... --max-cudagraph-capture-size= --ir-op-priority=
    --enable-flashinfer-autotune --disable-flashinfer-autotune --monokernel --no-monokernel
    --moe-backend= --linear-backend= --sparse-indexer-topk-backend= --speculative-config= -sc=
    --spec-method= --spec-model= --spec-tokens= --watermark-config= --diffusion-config= -dc=
    --kv-transfer-config= --kv-events-config= --ec-transfer-config= --ec-manager-config=
    --compilation-config= -cc= --attention-config= -ac= --engram-config= --reasoning-config=
    --kernel-config= --additional-config= --structured-outputs-config= --aux-output-config=
    --profiler-config= --watchdog-config= --optimization-level= --performance-mode=
    --weight-transfer-config= --disable-log-stats --aggregate-engine-logging
    --fail-on-environ-validation --no-fail-on-environ-validation --shutdown-timeout=
    --gdn-prefill-backend= --kda-prefill-backend= --kda-decode-backend= --enable-log-requests
    --disable-log-requests
"""
"""`vllm serve` 0.33.0."""

BENCH = """
    --trust-remote-code --seed= --num-prompts= --dataset-name= --no-stream --dataset-path=
    --no-oversample --skip-chat-template --enable-multimodal-chat --disable-shuffle
    --custom-output-len= --custom-ensure-client-side-data --spec-bench-output-len=
    --spec-bench-category= --sharegpt-output-len= --timed-trace-chunk-hash-size=
    --timed-trace-sec-multiplier= --timed-trace-label-timestamp= --timed-trace-label-input-length=
    --timed-trace-label-output-length= --timed-trace-label-hash-ids= --blazedit-min-distance=
    --blazedit-max-distance= --asr-max-audio-len-sec= --asr-min-audio-len-sec= --random-input-len=
    --random-output-len= --random-range-ratio= --random-prefix-len= --random-batch-size=
    --no-reranker --random-mm-base-items-per-request= --random-mm-num-mm-items-range-ratio=
    --random-mm-limit-mm-per-prompt= --random-mm-bucket-config= --hf-subset= --hf-split=
    --hf-name= --hf-output-len= --bfcl-categories= --prefix-repetition-prefix-len=
    --prefix-repetition-suffix-len= --prefix-repetition-num-prefixes=
    --prefix-repetition-output-len= --speed-bench-dataset-subset= --speed-bench-output-len=
    --speed-bench-category= --label= --backend= --base-url= --host= --port= --endpoint=
    --header=... --max-concurrency= --model= --input-len= --output-len= --tokenizer=
    --tokenizer-mode= --use-beam-search --logprobs= --request-rate= --burstiness=
    --probe-request-rate= --disable-tqdm --num-warmups= --profile --save-result --save-detailed
    --append-result --metadata=... --result-dir= --result-filename= --ignore-eos --self-timed
    --no-self-timed --percentile-metrics= --metric-percentiles= --goodput=... --request-id-prefix=
    --top-p= --top-k= --min-p= --temperature= --frequency-penalty= --presence-penalty=
    --repetition-penalty= --served-model-name= --lora-modules=... --lora-assignment=
    --ramp-up-strategy= --ramp-up-start-rps= --ramp-up-end-rps= --ready-check-timeout-sec=
    --chat-template-kwargs= --extra-body= --skip-tokenizer-init --insecure --plot-timeline
    --timeline-itl-thresholds= --plot-dataset-stats
"""
"""`vllm bench serve` 0.33.0."""

OLDER_SERVE = """
    --task= --use-v2-block-manager --guided-decoding-backend= --guided-decoding-disable-fallback
    --enable-reasoning --disable-frontend-multiprocessing --max-seq-len-to-capture=
    --num-lookahead-slots= --speculative-model= --num-speculative-tokens=
    --ngram-prompt-lookup-max= --ngram-prompt-lookup-min=
    --speculative-draft-tensor-parallel-size= --speculative-max-model-len=
    --speculative-disable-by-batch-size= --rope-theta= --rope-scaling= --swap-space= --device=
    --enable-prompt-adapter --max-prompt-adapters= --max-prompt-adapter-token=
    --tokenizer-pool-size= --tokenizer-pool-type= --preemption-mode= --worker-use-ray
    --lora-extra-vocab-size= --long-lora-scaling-factors= --cuda-graph-sizes=...
    --max-num-partial-prefills= --max-long-partial-prefills= --scheduler-delay-factor=
    --disable-async-output-proc --num-scheduler-steps= --multi-step-stream-outputs=
    --override-pooler-config= --calculate-kv-scales --disable-mm-preprocessor-cache
    --quantization-param-path= -O=
"""
"""Flags that earlier versions of `vllm serve` had."""

OLDER_BENCH = """
    --endpoint-type= --sonnet-input-len= --sonnet-output-len= --sonnet-prefix-len=
"""
"""Flags that earlier versions of `vllm bench serve` had."""
