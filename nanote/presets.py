"""Presets of train.py: {name: options that differ from the defaults of TrainConfig}.

Sources: Radford et al. 2019, table 2; Brown et al. 2020, table 2.1 (lr); JackFram/llama-160m; Llama 3 cards.
"""
GPT2 = dict(micro_batch_size=16, grad_accum=32, max_steps=20_000, warmup_steps=200)  # 0.5 M tokens per step
LLAMA = dict(activation="swiglu", use_rmsnorm=True, use_rotary=True, bias=False)
LLAMA3 = GPT2 | LLAMA | dict(n_head=32, n_kv_head=8, vocab_size=128256, rope_theta=5e5, grad_accum=64)
PRESETS = {
    # Byte-level language model of Python sources: about three minutes on two cores.
    "tiny": LLAMA | dict(
        n_layer=4, n_head=4, n_embd=128, seq_len=128, micro_batch_size=16, max_steps=500, lr=3e-3,
        warmup_steps=50, eval_interval=100, eval_tokens=320 * 128, checkpoint_interval=100),
    "gpt2-124m": GPT2 | dict(n_layer=12, n_head=12, n_embd=768, lr=6e-4),
    "gpt2-350m": GPT2 | dict(n_layer=24, n_head=16, n_embd=1024, lr=3e-4),
    "gpt2-774m": GPT2 | dict(
        n_layer=36, n_head=20, n_embd=1280, lr=2.5e-4, micro_batch_size=8, grad_accum=64),
    "gpt2-1.5b": GPT2 | dict(n_layer=48, n_head=25, n_embd=1600, lr=2e-4, micro_batch_size=8, grad_accum=64),
    "llama-160m": GPT2 | LLAMA | dict(
        n_layer=12, n_head=12, n_embd=768, n_inner=3072, tie_embeddings=False, layernorm_epsilon=1e-6,
        seq_len=2048, grad_accum=16, lr=6e-4),
    "llama3-1b": LLAMA3 | dict(
        n_layer=16, head_dim=64, n_embd=2048, n_inner=8192, seq_len=2048, micro_batch_size=4, lr=3e-4),
    "llama3-8b": LLAMA3 | dict(
        n_layer=32, head_dim=128, n_embd=4096, n_inner=14336, tie_embeddings=False, seq_len=8192,
        micro_batch_size=1, lr=3e-4, moment_dtype="bfloat16"),
    "hf": {},  # a model that tools/import_hf.py imported: its checkpoint has all options
}
