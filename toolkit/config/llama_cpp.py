"""Flags of `llama-server` that `tk serve` spells otherwise, does not need, or lacks.

The entries are as in `config.vllm`. Flags of both programs with the same name are left out."""

from toolkit.config.vllm import Note, Refusal, Table, Use

SERVE: Table = (
    # --- honoured under another name
    (Use("--model {}"), "-hf= -hfr= --hf-repo="),
    (Use("--served-model-name {}"), "-a= --alias="),
    (Use("--max-model-len {}"), "-c= --ctx-size="),
    (Use("--max-num-seqs {}"), "-np= --parallel="),
    (Use("--max-num-batched-tokens {}"), "-b= --batch-size="),
    (Use("--num-threads {}"), "-t= --threads="),
    (Use("--device cpu"), "-ngl=0 --gpu-layers=0 --n-gpu-layers=0"),
    (Use("--seed {}"), "-s="),
    (Use("--override-generation-config.temperature {}"), "--temp= --temperature="),
    (Use("--override-generation-config.top_k {}"), "--top-k="),
    (Use("--override-generation-config.top_p {}"), "--top-p="),
    (Use("--override-generation-config.min_p {}"), "--min-p="),
    (Use("--override-generation-config.repetition_penalty {}"), "--repeat-penalty="),
    (Use("--chat-template {}"), "--chat-template-file="),
    (Use("--default-chat-template-kwargs {}"), "--chat-template-kwargs="),
    (Use("--default-chat-template-kwargs.enable_thinking false"), "--reasoning-budget=0"),
    (Use("--ssl-keyfile {}"), "--ssl-key-file="),
    (Use("--ssl-certfile {}"), "--ssl-cert-file="),
    (Use("--no-web"), "--no-webui --no-ui"),
    (Use("--no-enable-prefix-caching"), "--no-cache-prompt"),
    (Use("--hf-overrides.rope_theta {}"), "--rope-freq-base="),
    (Use("--speculative-config.model {}"), "-md= --model-draft="),
    (
        Use("--speculative-config.num_speculative_tokens {}"),
        "--draft= --draft-n= --draft-max= --spec-draft-n-max=",
    ),
    (Use("--log-level debug"), "-v --verbose"),
    # --- accepted, without an effect: tk does it always, or in another way
    (
        Note("All layers run on one kind of device: the GPU if there is one, unless --device cpu"),
        "-ngl= --gpu-layers= --n-gpu-layers=",
    ),
    (Note("The context is the model's without --max-model-len"), "-c=0 --ctx-size=0"),
    (Note("A CPU's cores are counted; --num-threads sets their number"), "-t=-1 --threads=-1"),
    (Note("--max-num-seqs has a default"), "-np=-1 --parallel=-1"),
    (
        Note("A step has at most --max-num-batched-tokens tokens, with the same threads"),
        "-ub= --ubatch-size= -tb= --threads-batch=",
    ),
    (
        Note("The attention kernel is chosen for the device; see --attention-backend"),
        "-fa= --flash-attn=",
    ),
    (Note("Chat templates are always Jinja"), "--jinja"),
    (Note("Requests always run together"), "-cb --cont-batching"),
    (Note("All requests share one cache"), "-kvu --kv-unified --swa-full"),
    (
        Note("Prefixes of prompts are always cached"),
        "--cache-prompt --cache-reuse= -cram= --cache-ram= -sps= --slot-prompt-similarity=",
    ),
    (
        Note("The KV cache has the type of the model's activations"),
        "-ctk=f16 -ctk=bf16 --cache-type-k=f16 --cache-type-k=bf16 "
        "-ctv=f16 -ctv=bf16 --cache-type-v=f16 --cache-type-v=bf16",
    ),
    (Note("The way to read weights is chosen for the file"), "--mmap --no-mmap --mlock"),
    (Note("A start always warms the device up"), "--warmup"),
    (Note("GET /metrics, /slots and /props always work"), "--metrics --slots --props"),
    (Note("The page at / is on without --no-web"), "--webui --ui"),
    (Note("A prompt or an answer that is too long is not shifted"), "--no-context-shift"),
    (
        Note("--reasoning-parser says how reasoning is separated"),
        "--reasoning-format=auto --reasoning-format=deepseek",
    ),
    (
        Note("A model generates, embeds or scores as its file says; --pooling adds embeddings"),
        "--embedding --embeddings --rerank --reranking",
    ),
    (Note("There is no tower for pictures next to a GGUF file"), "--no-mmproj"),
    # --- refused
    (Refusal("Name the file after the repository: USER/REPO:FILE."), "-hff= --hf-file="),
    (Refusal("ps would show it. Set the variable HF_TOKEN."), "-hft="),
    (Refusal("Name a repository of the hub, or a file."), "-mu= --model-url="),
    (
        Refusal("Serve a folder of safetensors, which has the tower for pictures."),
        "-mm= --mmproj= -mmu= --mmproj-url=",
    ),
    (
        Refusal("Adapters are folders in PEFT's format: --lora-modules NAME=FOLDER."),
        "--lora= --lora-scaled= --control-vector= --control-vector-scaled=",
    ),
    (Refusal("Requests choose it: n_predict or max_tokens."), "--predict= --n-predict="),
    (
        Refusal("Requests choose it: grammar, json_schema or response_format."),
        "--grammar= --grammar-file= -j= --json-schema= -jf= --json-schema-file=",
    ),
    (
        Refusal("Requests choose it: presence_penalty, frequency_penalty, repeat_last_n."),
        "--presence-penalty= --frequency-penalty= --repeat-last-n=",
    ),
    (
        Refusal("The engine does not have this sampler."),
        "--mirostat= --typical= --typical-p= --dry-multiplier= --xtc-probability= "
        "--dynatemp-range= --top-nsigma= --top-n-sigma= --samplers= --sampler-seq=",
    ),
    (
        Refusal("Reasoning has no limit of its own; requests have max_tokens."),
        "--reasoning-budget=",
    ),
    (Refusal("--reasoning-parser says how reasoning is separated."), "--reasoning-format="),
    (
        Refusal("The cache has one type: --kv-cache-dtype."),
        "-ctk= --cache-type-k= -ctv= --cache-type-v=",
    ),
    (
        Refusal("A model is on one kind of device. Use --tensor-parallel-size for several GPUs."),
        "-sm= --split-mode= -ts= --tensor-split= -mg= --main-gpu= -ot= --override-tensor= "
        "-cmoe --cpu-moe -ncmoe= --n-cpu-moe= -nkvo --no-kv-offload",
    ),
    (Refusal("Start tk under taskset or numactl; see docs/cpu.md."), "-C= --cpu-mask= --numa="),
    (Refusal("--hf-overrides changes the model's configuration."), "--override-kv="),
    (Refusal("A proxy serves tk below a path, which --root-path names."), "--api-prefix="),
    (Refusal("Use --rope-scaling, with JSON."), "--rope-scale= --rope-freq-scale="),
    (Refusal("A prompt or an answer that is too long is not shifted."), "--context-shift --keep="),
    (Refusal("Use --request-timeout for the time of a request."), "-to= --timeout="),
    (Refusal("Prefixes of prompts are cached in memory alone."), "--slot-save-path="),
    (Refusal("Start a server for each model."), "--models-dir= --models-preset= --models-max="),
    (
        Refusal("Clients run their tools; tk calls none."),
        "--tools= --agent --mcp-servers-config= --mcp-servers-json=",
    ),
)
