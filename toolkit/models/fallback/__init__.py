"""Models without a description: Transformers' own code with our attention, cache and products.

`config` reads config.json without torch. `model` is the `CausalLM` that workers run; it builds
Transformers' model (`build`), finds out what each of its layers attends to (`probe`), replaces its
products and norms by ours (`swap`) and maps its parameters to a checkpoint's tensors (`names`)."""
