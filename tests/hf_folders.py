"""Shared by the tests of Hugging Face folders: a tiny byte-level BPE with a chat template, and a random
instruct model."""
import json
from pathlib import Path

# turns end with <|im_end|>, documents with <|endoftext|>, as in Qwen3
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1 and 2


def make_tokenizer(folder, text="the cat sat on the mat, the dog too. ", template=TEMPLATE,
                   eos="<|im_end|>"):
    """Write tokenizer.json, with a post-processor that prepends a token and truncation to 8 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.train_from_iterator([text] * 9, trainers.BpeTrainer(
        vocab_size=284, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    bpe.add_tokens(["<think>"])
    bpe.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A",
                                                       special_tokens=[(SPECIAL[0], 0)])
    bpe.enable_truncation(8)
    bpe.save(str(folder / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "bos_token": None}
    fields |= {"chat_template": template} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return bpe


def make_sentencepiece(folder, text="the cat sat on the mat, the dog too. "):
    """Write the tokenizer.json of a BPE as Llama 2's: spaces are ▁, one before the text, rare characters are
    tokens of bytes, and a text begins with <s>."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers

    bpe = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>"]
    bytes_as_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    bpe.train_from_iterator([text] * 9, trainers.BpeTrainer(
        vocab_size=288, special_tokens=special + bytes_as_tokens, show_progress=False))
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                     decoders.Strip(" ", 1, 0)])
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    content = json.loads(bpe.to_str())
    content["added_tokens"] = content["added_tokens"][:len(special)]
    Path(folder, "tokenizer.json").write_text(json.dumps(content))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    Path(folder, "tokenizer_config.json").write_text(json.dumps(fields))


def edit_json(path, **fields):
    """Replace fields of a JSON file."""
    Path(path).write_text(json.dumps(json.loads(Path(path).read_text()) | fields))


def make_model(folder, n_positions=96, eos_token_id=(2, 0)):
    """Write a random Qwen3 whose greedy text varies, and return it."""
    import torch
    import transformers

    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        vocab_size=288, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=n_positions, tie_word_embeddings=False,
        eos_token_id=eos_token_id[0], bos_token_id=None,
    )).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3) if parameter.dim() > 1 else parameter.add_(0.1)
    model.generation_config.eos_token_id = list(eos_token_id)
    model.save_pretrained(folder)
    return model
