#!/usr/bin/env python3
"""Write model folders with random weights, of widths that no small trained model has: for times, which do not depend on values.

    python3 bench/make_models.py --out DIR 256x4 1024x2 4096x1

WIDTHxLAYERS is a folder of that name: Llama, bfloat16, heads of 64 (128 from a width of 2048 on), a quarter of them for keys and values, an inner
size of 8/3 of the width in whole 256, 2,048 words. The same files from the same seed.
"""
import argparse
import json
import os
import random


def tensors(width, layers, vocab):
    head = 128 if width >= 2048 else 64
    heads = max(1, width // head)
    kv = max(1, heads // 4)
    inner = -(-width * 8 // 3 // 256) * 256
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
              "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": head, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": vocab,
              "tie_word_embeddings": True, "hidden_act": "silu", "max_position_embeddings": 131072}
    shapes = {"model.embed_tokens.weight": [vocab, width], "model.norm.weight": [width]}
    for i in range(layers):
        for name, shape in {"self_attn.q_proj": [heads * head, width], "self_attn.k_proj": [kv * head, width], "self_attn.v_proj": [kv * head, width],
                            "self_attn.o_proj": [width, heads * head], "mlp.gate_proj": [inner, width], "mlp.up_proj": [inner, width],
                            "mlp.down_proj": [width, inner], "input_layernorm": [width], "post_attention_layernorm": [width]}.items():
            shapes[f"model.layers.{i}.{name}.weight"] = shape
    return config, shapes


def write(folder, width, layers, vocab, seed):
    os.makedirs(folder, exist_ok=True)
    config, shapes = tensors(width, layers, vocab)
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = random.Random(seed)
    high = bytes([0x3C, 0xBC][i % 2] for i in range(256))  # numbers of +-0.008 to 0.03
    with open(os.path.join(folder, "model.safetensors"), "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            for _ in range(shape[0] if len(shape) > 1 else 1):
                row = bytearray(2 * shape[-1])
                if len(shape) == 1:
                    row[0::2], row[1::2] = b"\x80" * shape[0], b"\x3f" * shape[0]  # 1.0
                else:
                    row[0::2], row[1::2] = rng.randbytes(shape[1]), rng.randbytes(shape[1]).translate(high)
                f.write(row)
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config, f, indent=1)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", required=True)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--vocab", type=int, default=2048)
    p.add_argument("models", nargs="+", metavar="WIDTHxLAYERS")
    o = p.parse_args()
    for model in o.models:
        width, layers = map(int, model.split("x"))
        write(os.path.join(o.out, model), width, layers, o.vocab, o.seed)


if __name__ == "__main__":
    main()
