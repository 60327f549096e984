"""Flags of `vllm serve` and `vllm bench serve` that tk spells otherwise, does not need, or lacks.

Flags that have the same name and meaning in both programs are not listed. Each entry is an outcome
and the flags that have it, separated by spaces:

    --flag        a switch; --no-flag is its opposite
    --flag=       a flag with a value
    --flag=...    a flag with one or more values
    --flag=word   a flag with this value. Others of its values have another entry, or are tk's own

`cli.vllm` reads command lines by this table, `translate_settings` the arguments of `LLM`, and
docs/from-vllm.md shows it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.errors import ConfigError

logger = logging.getLogger(__name__)

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Use:
    """tk's flags for a flag. `{}` stands for its value.

    `divisor`: of a value that is a number. `order`: -1 puts the flags before those of the command
    line, which override them, and 1 after those. `{host}` and `{port}`: values of these flags."""

    flags: str
    divisor: int = 1
    order: int = 0


@dataclass(frozen=True, slots=True)
class Variable:
    """The environment variable of another program that a flag with a folder sets."""

    name: str


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence that says why a flag has no effect."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """Sentences that say what to use instead of a flag, or why there is nothing."""

    advice: str


Outcome = Use | Variable | Note | Refusal
Table = tuple[tuple[Outcome, str], ...]

DEFAULTS = {"host": "127.0.0.1", "port": "8000"}
"""Values of flags that `{host}` and `{port}` stand for, if they are not given."""

SERVE: Table = (
    # --- honoured under another name
    (Use("--tensor-parallel-size {}"), "-tp="),
    (Use("--pipeline-parallel-size {}"), "-pp="),
    (Use("--data-parallel-size {}"), "-dp="),
    (Use("--enable-expert-parallel"), "-ep"),
    (Use("--quantization {}"), "-q="),
    (Use("--speculative-config {}"), "-sc="),
    (Use("--help-all"), "--help="),
    (Use("--dtype float16"), "--dtype=half"),
    (Use("--dtype float32"), "--dtype=float"),
    (Use("--api-workers {}"), "--api-server-count= -asc="),
    (Use("--gpu-memory-utilization {}"), "--device-memory-utilization="),
    (Use("--kv-cache-memory {}", divisor=GIB), "--kv-cache-memory-bytes="),
    (Use("--kv-cache-dtype fp8"), "--kv-cache-dtype=fp8_e4m3"),
    (Use("--sse-keep-alive {}"), "--sse-keep-alive-interval="),
    (Use("--max-queue {}"), "--max-num-queued-reqs="),
    (Use("--max-queue-tokens {}"), "--max-num-queued-tokens="),
    (Use("--max-num-seqs {}", order=1), "--max-num-active-seqs="),
    (Use("--max-num-batched-tokens {}", order=1), "--max-num-scheduled-tokens="),
    (Use("--limit-mm-per-prompt image=0"), "--language-model-only"),
    (Use("--uvicorn-log-level debug"), "--uvicorn-log-level=trace"),
    (Use("--uvicorn-log-level error"), "--uvicorn-log-level=critical"),
    (Use("--log-level debug"), "--log-level=DEBUG --log-level=NOTSET"),
    (Use("--log-level info"), "--log-level=INFO"),
    (Use("--log-level warning"), "--log-level=WARNING"),
    (Use("--log-level error"), "--log-level=ERROR --log-level=CRITICAL"),
    (Use("--model-impl toolkit"), "--model-impl=vllm"),
    (Use("--generation-config none"), "--generation-config=vllm"),
    (Use(""), "--generation-config=auto"),
    (Use("--load-format auto"), "--load-format=pt --load-format=hf --load-format=gguf"),
    (Use("--attention-backend flash"), "--attention-backend=FLASH_ATTN"),
    (Use("--attention-backend triton"), "--attention-backend=TRITON_ATTN"),
    (Use("--attention-backend cpu"), "--attention-backend=CPU_ATTN"),
    (Use("--attention-backend torch"), "--attention-backend=TORCH_SDPA"),
    (Use("--distributed-executor-backend mp"), "--distributed-executor-backend=uni"),
    (Use("--speculative-config.method {}"), "--spec-method="),
    (Use("--speculative-config.model {}"), "--spec-model= --speculative-model="),
    (
        Use("--speculative-config.num_speculative_tokens {}"),
        "--spec-tokens= --num-speculative-tokens=",
    ),
    (Use("--speculative-config.prompt_lookup_max {}"), "--ngram-prompt-lookup-max="),
    (Use("--speculative-config.prompt_lookup_min {}"), "--ngram-prompt-lookup-min="),
    (Use("--hf-overrides.rope_theta {}"), "--rope-theta="),
    (Use("--enforce-eager"), "--optimization-level=0 -O=0"),
    (Variable("HF_HUB_CACHE"), "--download-dir="),
    # --- accepted, without an effect: tk does it always, or in another way
    (
        Note("The format of quantized weights is read from the checkpoint"),
        "--quantization=awq --quantization=awq_marlin --quantization=gptq "
        "--quantization=gptq_marlin --quantization=compressed-tensors --quantization=mxfp4 "
        "--quantization=gguf --allow-deprecated-quantization",
    ),
    (Note("Long prompts are always computed in parts"), "--enable-chunked-prefill"),
    (
        Note(
            "Tools are on unless --tool-call-parser is none; its default, auto, works with any "
            "chat template"
        ),
        "--enable-auto-tool-choice",
    ),
    (
        Note("A model generates, embeds or scores as its folder says; --pooling adds embeddings"),
        "--runner=auto --runner=generate --runner=pooling --convert=auto --convert=none "
        "--task=auto --task=generate --task=embed --task=embedding --task=classify --task=score",
    ),
    (
        Note("The format of messages is read from the chat template"),
        "--chat-template-content-format=auto",
    ),
    (Note("The answer's role is always assistant"), "--response-role=assistant"),
    (
        Note("The tokenizer is the fast one of the model's folder"),
        "--tokenizer-mode=auto --tokenizer-mode=hf --tokenizer-pool-size= --tokenizer-pool-type=",
    ),
    (
        Note("Long conversations are rendered in threads; --api-workers adds processes"),
        "--renderer-num-workers=",
    ),
    (Note("Only files that the model needs are downloaded"), "--ignore-patterns=..."),
    (Note("No metric is hidden"), "--show-hidden-metrics-for-version="),
    (Note("config.json is read"), "--config-format=auto --config-format=hf"),
    (
        Note("Log-probabilities are those of the model, before sampling"),
        "--logprobs-mode=raw_logprobs",
    ),
    (Note("The usage of an answer always has them"), "--enable-prompt-tokens-details"),
    (Note("GET /load always works"), "--enable-server-load-tracking"),
    (Note("GET /tokenizer_info always works"), "--enable-tokenizer-info-endpoint"),
    (Note("Answers always have the header X-Request-Id"), "--enable-request-id-headers"),
    (Note("/docs always works without a network"), "--enable-offline-docs"),
    (
        Note("The log has no prompts and no answers"),
        "--max-log-len= --enable-log-deltas",
    ),
    (
        Note("Tracebacks are in errors.log, and TK_DEBUG=1 prints them"),
        "--log-error-stack",
    ),
    (
        Note("The log has a line per generation request, and none for other endpoints"),
        "--disable-access-log-for-endpoints=",
    ),
    (
        Note("An event has the tokens that are ready, so a busy server sends fewer events"),
        "--stream-interval=",
    ),
    (
        Note("tk parses HTTP without h11"),
        "--h11-max-incomplete-event-size= --h11-max-header-count=",
    ),
    (
        Note("Reasoning is separated if --reasoning-parser names its format or finds it"),
        "--enable-reasoning",
    ),
    (
        Note("Weights are read in parallel, straight to the device"),
        "--safetensors-load-strategy= --safetensors-prefetch-num-threads= "
        "--safetensors-prefetch-block-size= --max-parallel-loading-workers= "
        "--pt-load-map-location=",
    ),
    (
        Note("Progress is shown on terminals"),
        "--use-tqdm-on-load",
    ),
    (
        Note("Kernels are chosen for the device, the model and the step"),
        "--moe-backend= --linear-backend= --sparse-indexer-topk-backend= --mamba-backend= "
        "--mamba-ssu-algorithm= --gdn-prefill-backend= --kda-prefill-backend= "
        "--kda-decode-backend= --ir-op-priority= --kernel-config= --enable-flashinfer-autotune "
        "--monokernel --all2all-backend= --disable-custom-all-reduce --disable-cascade-attn "
        "--mm-encoder-attn-backend= --use-fp64-gumbel --enable-hc-sp "
        "--enable-batch-sharded-sampling --use-v2-block-manager --swa-bounded-replay "
        "--enable-flash-late-interaction",
    ),
    (
        Note("Steps run as CUDA graphs of sizes that tk chooses; --enforce-eager turns them off"),
        "--compilation-config= -cc= --optimization-level= -O= --cudagraph-capture-sizes=... "
        "--max-cudagraph-capture-size= --cuda-graph-sizes=... --max-seq-len-to-capture= "
        "--jit-monitor-mode= --jit-monitor-verbose",
    ),
    (
        Note("A step decodes first, then fills --max-num-batched-tokens with prompts"),
        "--performance-mode= --long-prefill-token-threshold= "
        "--long-prefill-token-threshold-adaptive --disable-chunked-mm-input "
        "--scheduler-reserve-full-isl --watermark= --prefill-schedule-interval= "
        "--max-num-partial-prefills= --max-long-partial-prefills= --scheduler-delay-factor= "
        "--num-scheduler-steps= --multi-step-stream-outputs= --num-lookahead-slots= "
        "--preemption-mode= --dp-sync-interval= --disable-async-output-proc",
    ),
    (
        Note("Blocks of the cache are found by a hash that cannot be chosen"),
        "--prefix-caching-hash-algo= --prefix-match-unit= --prefix-cache-retention-interval=",
    ),
    (
        Note("States of recurrent layers are kept next to the cache; see --state-cache-gib"),
        "--mamba-block-size= --mamba-cache-mode= --enable-mamba-shared-prefix-checkpoint "
        "--replayssm-buffer-len= --use-replayssm --disable-hybrid-kv-cache-manager "
        "--mamba-cache-dtype=auto",
    ),
    (
        Note("--mm-cache-gib is the memory for encoded pictures"),
        "--mm-processor-cache-gb= --mm-processor-cache-type= --mm-hasher-algorithm= "
        "--mm-shm-cache-max-object-size-mb= --disable-mm-preprocessor-cache --mm-tensor-ipc= "
        "--mm-ipc-gpu-memory-gb= --skip-mm-profiling",
    ),
    (Note("Pictures are resized on the CPU"), "--mm-processor-device= --mm-device-do-normalize"),
    (Note("Adapters have the type of the model"), "--lora-dtype=auto"),
    (
        Note("Adapters are sharded like the layers that they change"),
        "--fully-sharded-loras --specialize-active-lora --enable-mixed-moe-lora-format "
        "--enable-moe-shared-loras",
    ),
    (Note("Adapters with tokens of their own are refused"), "--lora-extra-vocab-size="),
    (
        Note("Grammars are llguidance's"),
        "--guided-decoding-backend= --structured-outputs-config= "
        "--guided-decoding-disable-fallback",
    ),
    (
        Note("HTTP and the engine are always separate processes"),
        "--disable-frontend-multiprocessing",
    ),
    (
        Note("Statistics and metrics are those of all engines together"),
        "--aggregate-engine-logging ",
    ),
    (Note("A variable TK_* that no setting reads is a warning"), "--fail-on-environ-validation"),
    (Note("The engines' messages need no port"), "--data-parallel-rpc-port= -dpp="),
    (Note("The engines run on this machine"), "--data-parallel-backend=mp -dpb=mp"),
    (Note("There is one machine"), "--nnodes=1 -n=1 --node-rank=0 -r=0"),
    (
        Note("An engine that dies or hangs is restarted; see --worker-timeout"),
        "--enable-fault-tolerance --fault-tolerance-config= --watchdog-config= "
        "--distributed-timeout-seconds= --cpu-distributed-timeout-seconds=",
    ),
    (
        Note("--ssl-ca-certs always asks clients for certificates, and only then"),
        "--ssl-cert-reqs=2",
    ),
    (Note("Nothing is offloaded"), "--cpu-offload-gb=0 --offload-backend=auto"),
    # --- refused
    (
        Refusal("tk serve --dry-run prints the largest length that fits. Give that."),
        "--max-model-len=auto --max-model-len=-1",
    ),
    (
        Refusal("Download the revision with 'tk pull', and give its folder as --tokenizer."),
        "--tokenizer-revision=",
    ),
    (Refusal("Code comes from the folder of --revision."), "--code-revision="),
    (Refusal("ps would show it. Set the variable HF_TOKEN."), "--hf-token="),
    (Refusal("Give its fields as --hf-overrides."), "--hf-config-path= "),
    (Refusal("Only config.json is read."), "--config-format="),
    (Refusal("Use a checkpoint with tokenizer.json."), "--tokenizer-mode="),
    (Refusal("Answers are texts, which need the tokenizer."), "--skip-tokenizer-init"),
    (
        Refusal("A model's folder says what it does. --pooling last, mean or cls adds embeddings."),
        "--pooler-config= --override-pooler-config= --convert= --runner= --task=",
    ),
    (
        Refusal("--quantization fp8, int8 or int4 quantizes while loading."),
        "--quantization-config= --quantization-param-path= --calculate-kv-scales",
    ),
    (
        Refusal("The format of messages cannot be set. Change the template: --chat-template."),
        "--chat-template-content-format=",
    ),
    (Refusal("The answer's role is always assistant."), "--response-role="),
    (
        Refusal("Requests cannot change the processing of pictures; --mm-processor-kwargs does."),
        "--trust-request-mm-kwargs --media-io-kwargs=",
    ),
    (
        Refusal("Requests choose it: reasoning_effort, and chat_template_kwargs."),
        "--reasoning-effort-map= --reasoning-config= --anthropic-disabled-thinking-effort= ",
    ),
    (
        Refusal("Requests choose it: return_tokens_as_token_ids or return_token_ids in the body."),
        "--return-tokens-as-token-ids --tokens-only",
    ),
    (
        Refusal("Requests choose it: strict in a tool, and tool_choice."),
        "--tool-strict-level= ",
    ),
    (
        Refusal("Leave the tools out of requests that must not call them."),
        "--exclude-tools-when-tool-choice-none",
    ),
    (Refusal("Cohere's formats are not read."), "--cohere-is-reasoning-model --cohere-format="),
    (
        Refusal("Clients run their tools; tk calls none."),
        "--tool-server=",
    ),
    (
        Refusal('Clients ask for it: "stream_options": {"include_usage": true}.'),
        "--enable-force-include-usage",
    ),
    (Refusal("GET /metrics has the times of all requests."), "--enable-per-request-metrics"),
    (Refusal("The log has no prompts and no answers."), "--enable-log-outputs"),
    (
        Refusal("Use --log-level and --log-format."),
        "--log-config-file= --logging-config=",
    ),
    (Refusal("A proxy can hide /docs; see docs/operations.md."), "--disable-fastapi-docs"),
    (Refusal("tk speaks HTTP."), "--grpc --grpc-port="),
    (
        Refusal("--ssl-ca-certs always requires certificates of clients. Leave the flag out."),
        "--ssl-cert-reqs=",
    ),
    (
        Refusal("Restart the server, or let a proxy serve TLS."),
        "--enable-ssl-refresh --ssl-ciphers=",
    ),
    (
        Refusal(
            "Start a server on each machine behind a proxy, or use "
            "--distributed-executor-backend ray; see docs/multi-gpu.md."
        ),
        "--headless --nnodes= --node-rank= -r= --master-addr= --master-port= "
        "--data-parallel-address= -dpa= --data-parallel-rank= -dpn= --data-parallel-start-rank= "
        "-dpr= --data-parallel-size-local= -dpl= --data-parallel-hybrid-lb -dph "
        "--data-parallel-external-lb -dpe --data-parallel-multi-port-external-lb -dpm "
        "--data-parallel-supervisor-port= --dp-supervisor-probe-interval-s= "
        "--dp-supervisor-probe-timeout-s= --dp-supervisor-probe-failure-threshold= "
        "--enable-scale-out --disable-nccl-for-dp-synchronization",
    ),
    (
        Refusal(
            "If it is vLLM's number of machines, see docs/multi-gpu.md; if it is llama.cpp's "
            "number of tokens, requests have max_tokens."
        ),
        "-n=",
    ),
    (
        Refusal("Use --distributed-executor-backend ray."),
        "--data-parallel-backend= -dpb= --worker-use-ray",
    ),
    (Refusal("Set the variable CUDA_VISIBLE_DEVICES."), "--device-ids="),
    (
        Refusal("Start tk under numactl; see docs/cpu.md."),
        "--numa-bind --numa-bind-nodes=... --numa-bind-cpus=...",
    ),
    (
        Refusal("A context is not split over GPUs. Use --tensor-parallel-size."),
        "--decode-context-parallel-size= -dcp= --prefill-context-parallel-size= -pcp= "
        "--dcp-comm-backend= --dcp-q-replicate --dcp-kv-cache-interleave-size= "
        "--cp-kv-cache-interleave-size=",
    ),
    (
        Refusal("--enable-expert-parallel gives each GPU complete experts, in a fixed order."),
        "--enable-eplb --eplb-config= --expert-placement-strategy= --enable-elastic-ep "
        "--elastic-ep-max-dp-size= --enable-ep-weight-filter --enable-dbo "
        "--dbo-decode-token-threshold= --dbo-prefill-token-threshold= --enable-shm-tensor-arena",
    ),
    (
        Refusal("--model-impl transformers runs other models; docs/plugins.md has tk's plug-ins."),
        "--model-class-overrides= --worker-cls= --worker-extension-cls= --scheduler-cls= "
        "--io-processor-plugin= --additional-config= --engram-config= --aux-output-config=",
    ),
    (
        Refusal("Weights stay in the memory of the device. --quantization int4 makes them small."),
        "--cpu-offload-gb= --cpu-offload-params=... --offload-backend= --offload-group-size= "
        "--offload-num-in-group= --offload-prefetch-step= --offload-params=...",
    ),
    (
        Refusal("--swap-space keeps blocks of preempted requests in host memory."),
        "--kv-offloading-size= --kv-offloading-backend= --kv-transfer-config= "
        "--kv-events-config= --ec-transfer-config= --ec-manager-config=",
    ),
    (
        Refusal("A server does not sleep. 'tk stop' ends it and frees its memory."),
        "--enable-sleep-mode --sleep-mode-backend= --sleep-mode-offload-cudagraph "
        "--sleep-preserve-parameter-names=... --enable-cumem-allocator "
        "--enable-nccl-comm-suspend --weight-transfer-config=",
    ),
    (Refusal("Weights are read without further settings."), "--model-loader-extra-config="),
    (
        Refusal("The whole cache has one type: --kv-cache-dtype."),
        "--kv-cache-dtype-skip-layers=... --kv-sharing-fast-prefill",
    ),
    (
        Refusal("Use --mamba-ssm-cache-dtype; the other states have the model's type."),
        "--mamba-cache-dtype= --enable-mamba-cache-stochastic-rounding "
        "--mamba-cache-philox-rounds=",
    ),
    (
        Refusal("Windows are as the model has them; --hf-overrides changes config.json."),
        "--disable-sliding-window",
    ),
    (
        Refusal("Give the largest number that requests ask for, up to 100."),
        "--max-logprobs=-1",
    ),
    (Refusal("Log-probabilities are those before sampling."), "--logprobs-mode="),
    (
        Refusal("Prompts are text, token ids and pictures."),
        "--enable-prompt-embeds --enable-mm-embeds --interleave-mm-strings "
        "--video-pruning-rate= --video-pruning-method= --diffusion-config= -dc=",
    ),
    (
        Refusal("A server encodes the pictures of its own model."),
        "--mm-encoder-only --mm-encoder-tp-mode= --mm-encoder-attn-dtype= "
        "--mm-encoder-fp8-scale-path= --mm-encoder-fp8-scale-save-path= "
        "--mm-encoder-fp8-scale-save-margin=",
    ),
    (
        Refusal("Adapters change the layers that their files name, in the model's type."),
        "--lora-dtype= --lora-target-modules=... --enable-tower-connector-lora "
        "--default-mm-loras= --max-lora-cls-labels= --long-lora-scaling-factors= "
        "--enable-prompt-adapter --max-prompt-adapters= --max-prompt-adapter-token=",
    ),
    (
        Refusal("Use --attention-backend; without it, the log says which was chosen and why."),
        "--attention-config= -ac=",
    ),
    (
        Refusal("Answers have tk's system_fingerprint, and no watermark."),
        "--fingerprint-mode= --fingerprint-value= --watermark-config=",
    ),
    (
        Refusal("Answers have neither experts nor masks."),
        "--enable-return-routed-experts --return-sampling-mask --enable-trace-replay",
    ),
    (
        Refusal("'tk bench offline --profile FILE' profiles the engine."),
        "--profiler-config= --ray-workers-use-nsight --enable-layerwise-nvtx-tracing",
    ),
    (
        Refusal("'tk man metrics' lists the metrics that there are."),
        "--collect-detailed-traces=... --per-request-spec-decode-metrics= --kv-cache-metrics "
        "--kv-cache-metrics-sample= --custom-histogram-buckets= --cudagraph-metrics "
        "--enable-mfu-metrics --enable-logging-iteration-details",
    ),
    (
        Refusal("A drafter runs as --speculative-config says; docs/speculative.md has its fields."),
        "--speculative-draft-tensor-parallel-size= --speculative-max-model-len= "
        "--speculative-disable-by-batch-size=",
    ),
)

BENCH: Table = (
    # --- honoured under another name
    (Use("--help-all"), "--help="),
    (Use("--url http://{host}:{port}", order=-1), "--host= --port="),
    (Use("--model {}", order=1), "--served-model-name="),
    (
        Use("--endpoint completions", order=-1),
        "--backend=vllm --backend=openai --endpoint-type=vllm --endpoint-type=openai",
    ),
    (
        Use("--endpoint chat"),
        "--backend=openai-chat --endpoint-type=openai-chat",
    ),
    (
        Use("--dataset-name prefix --random-input-len 256", order=-1),
        "--dataset-name=prefix_repetition",
    ),
    (Use("--random-input-len {}"), "--input-len= --prefix-repetition-suffix-len="),
    (Use("--random-output-len {}"), "--prefix-repetition-output-len="),
    (Use("--prefix-len {}"), "--prefix-repetition-prefix-len="),
    (Use("--num-prefixes {}"), "--prefix-repetition-num-prefixes="),
    (
        Use("--output-len {}"),
        "--custom-output-len= --sharegpt-output-len=",
    ),
    (Use("--extra-body.temperature {}"), "--temperature="),
    (Use("--extra-body.top_p {}"), "--top-p="),
    (Use("--extra-body.top_k {}"), "--top-k="),
    (Use("--extra-body.min_p {}"), "--min-p="),
    (Use("--extra-body.frequency_penalty {}"), "--frequency-penalty="),
    (Use("--extra-body.presence_penalty {}"), "--presence-penalty="),
    (Use("--extra-body.repetition_penalty {}"), "--repetition-penalty="),
    (Use("--extra-body.logprobs {}"), "--logprobs="),
    (Use("--extra-body.chat_template_kwargs {}"), "--chat-template-kwargs="),
    (Use("--save-result"), "--save-detailed --plot-timeline"),
    (Use("--metadata label={}"), "--label="),
    # --- accepted, without an effect
    (
        Note("Prompts are token ids or texts, which the server tokenizes"),
        "--tokenizer= --tokenizer-mode= --skip-tokenizer-init --trust-remote-code",
    ),
    (Note("The output length is the dataset's"), "--custom-output-len=-1"),
    (
        Note("Prompts of files are sent as they are, in their order"),
        "--skip-chat-template --disable-shuffle --no-stream",
    ),
    (Note("Progress is shown on terminals"), "--disable-tqdm"),
    (Note("A trace is replayed at its own times unless a rate is given"), "--self-timed"),
    (Note("There is no shared prefix"), "--random-prefix-len=0"),
    (Note("The report of --save-result has no thresholds"), "--timeline-itl-thresholds="),
    # --- refused
    (
        Refusal("Give --request-rate or --max-concurrency; a trace is then not self-timed."),
        "--no-self-timed",
    ),
    (
        Refusal("Use --dataset-name prefix --num-prefixes 1 --prefix-len N."),
        "--random-prefix-len=",
    ),
    (
        Refusal("A file's requests start over at its end. Give --num-prompts N."),
        "--no-oversample",
    ),
    (
        Refusal("tk bench loads /v1/completions and /v1/chat/completions."),
        "--backend= --endpoint-type= --random-batch-size= --no-reranker "
        "--dataset-name=random-rerank --use-beam-search",
    ),
    (
        Refusal("Write the requests, pictures included, as messages of --dataset-name custom."),
        "--dataset-name=random-mm --dataset-name=custom_audio --dataset-name=custom_image "
        "--enable-multimodal-chat --custom-ensure-client-side-data "
        "--random-mm-base-items-per-request= --random-mm-num-mm-items-range-ratio= "
        "--random-mm-limit-mm-per-prompt= --random-mm-bucket-config= --asr-max-audio-len-sec= "
        "--asr-min-audio-len-sec=",
    ),
    (
        Refusal(
            "The hub's data sets are not read. Save the rows as lines of JSON, and use "
            "--dataset-name custom --dataset-path FILE."
        ),
        "--dataset-name=hf --dataset-name=spec_bench --dataset-name=speed_bench --hf-name= "
        "--hf-subset= --hf-split= --hf-output-len= --spec-bench-output-len= --spec-bench-category= "
        "--speed-bench-dataset-subset= --speed-bench-output-len= --speed-bench-category= "
        "--bfcl-categories= --blazedit-min-distance= --blazedit-max-distance=",
    ),
    (
        Refusal(
            "Prompts that share 200 of 550 tokens: --dataset-name prefix --prefix-len 200 "
            "--random-input-len 350."
        ),
        "--dataset-name=sonnet --sonnet-input-len= --sonnet-output-len= --sonnet-prefix-len=",
    ),
    (
        Refusal(
            "Use --dataset-name trace: times in milliseconds, ids of blocks of 512 tokens. With "
            "--request-rate the file's times are not used."
        ),
        "--dataset-name=timed_trace --dataset-name=burstgpt --timed-trace-chunk-hash-size= "
        "--timed-trace-sec-multiplier= --timed-trace-label-timestamp= "
        "--timed-trace-label-input-length= --timed-trace-label-output-length= "
        "--timed-trace-label-hash-ids=",
    ),
    (Refusal("'tk bench offline --profile FILE' profiles the engine."), "--profile"),
    (Refusal("Run a second tk bench with its own rate."), "--probe-request-rate="),
    (Refusal("Each run has its own file; give another --result-filename."), "--append-result"),
    (Refusal("--header sends a header of your own with all requests."), "--request-id-prefix="),
    (
        Refusal("Run a tk bench for each adapter: --model NAME."),
        "--lora-modules=... --lora-assignment=",
    ),
    (
        Refusal("The NAME.jsonl of --save-result has the lengths of each request."),
        "--plot-dataset-stats",
    ),
)


def translate_settings(settings: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return arguments of vLLM's `LLM` under tk's names, without those that have no effect.

    `known`: tk's names. An argument that has no effect is logged, unless it is None or False.
    Raises ConfigError for one that the table refuses."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        outcome = _outcome(name, value, is_known=name in known)
        if outcome is None:
            found[name] = value
        elif value is None or (value is False and not isinstance(outcome, Note)):
            continue
        elif isinstance(outcome, Note):
            logger.warning("%s=%r has no effect. %s.", name, value, outcome.reason)
        elif isinstance(outcome, Use) and "." not in outcome.flags:
            found |= _used(outcome, name, value)
        else:
            shown = f"{name}={value!r}" if name in known else name
            raise ConfigError(f"tk has no {shown}. {_advice(outcome)}", param=name)
    return found


def _outcome(name: str, value: Any, *, is_known: bool) -> Outcome | None:
    """Return what an argument does; None for tk's own and unknown ones."""
    flag = f"--{name.replace('_', '-')}"
    rules = {text: outcome for outcome, flags in SERVE for text in flags.split()}
    exact = rules.get(f"{flag}={value}")
    if exact is not None or is_known:
        return exact
    return rules.get(flag) or rules.get(f"{flag}=") or rules.get(f"{flag}=...")


def _used(use: Use, name: str, value: Any) -> dict[str, Any]:
    """Return tk's setting for an argument; none if tk's default does the same."""
    flag, _, word = use.flags.partition(" ")
    if not flag:
        return {}
    given: Any = word or True
    if word == "{}":
        if use.divisor != 1 and not isinstance(value, int | float):
            raise ConfigError(f"{name} must be a number; got {value!r}.", param=name)
        given = value / use.divisor if use.divisor != 1 else value
    elif "=" in word:
        key, _, number = word.partition("=")
        given = {key: int(number)}
    return {flag[2:].replace("-", "_"): given}


def _advice(outcome: Use | Variable | Refusal) -> str:
    if isinstance(outcome, Refusal):
        return outcome.advice
    if isinstance(outcome, Variable):
        return f"Set the variable {outcome.name}."
    setting, _, key = outcome.flags.split()[0][2:].replace("-", "_").partition(".")
    return f"Use {setting}={{{key!r}: ...}}."
