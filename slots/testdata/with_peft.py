"""Adapters to and from PEFT.

    python with_peft.py make DIR    writes the fixtures of TestAdaptersOfPEFT (torch 2.15, transformers 5.24, peft 0.21.2)
    python with_peft.py check DIR   PEFT must read every folder in DIR, finding each tensor as it is in the file, and give the ranks and scales
                               of the folder's expected.json, where there is one. TestPEFTReadsWhatIsSaved runs it.
"""
import json
import os
import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

MLP = ["gate_proj", "up_proj", "down_proj"]
# The first pattern that matches counts, and PEFT sorts them when it saves: they must be sorted here to mean the same before and after.
CASES = {
    "patterns": dict(r=4, lora_alpha=6, use_rslora=True, target_modules=["q_proj", "o_proj", "up_proj", "down_proj"],
                     rank_pattern={"^model.layers.0.*": 1, r"layers\.1\.mlp\.up_proj": 3, "proj": 5, "q_proj": 2},
                     alpha_pattern={r".*\.(1|10)\..*": 16, "down_proj": 3, "model.layers.2.self_attn.q_proj": 1}),
    "regex": dict(r=2, lora_alpha=3, target_modules=r".*\.(0|1|11)\.(self_attn\.(q|v)|mlp\.up)_proj",
                  exclude_modules=r"model\.layers\.1\.mlp.*"),
    "layers": dict(r=1, lora_alpha=1, target_modules=["model.layers.3.self_attn.k_proj", "v_proj", "mlp.up_proj"],
                   layers_to_transform=[1, 10], layers_pattern="layers", exclude_modules=["10.self_attn.v_proj"]),
    "layer": dict(r=1, lora_alpha=2, target_modules=MLP, layers_to_transform=11),
    "linear-bf16": dict(r=1, lora_alpha=8, target_modules="all-linear", dtype=torch.bfloat16, exclude_modules=["q_proj"]),
    "half": dict(r=2, lora_alpha=8, target_modules=["k_proj"], dtype=torch.float16, lora_dropout=0.1, init_lora_weights="gaussian"),
}


def base(tiny=False):
    sizes = dict(hidden_size=64, intermediate_size=160, head_dim=32, num_attention_heads=4, num_hidden_layers=3) if tiny else dict(
        hidden_size=8, intermediate_size=12, head_dim=4, num_attention_heads=2, num_hidden_layers=12)
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=32, num_key_value_heads=2 if tiny else 1, **sizes))


def layers(model):
    """The adapted modules by path, in order."""
    for name, module in model.base_model.model.named_modules():
        if hasattr(module, "lora_A") and "default" in getattr(module, "lora_A"):
            yield name, module


def expected(model):
    out = {}
    for name, m in layers(model):
        a, b = m.lora_A["default"].weight.float(), m.lora_B["default"].weight.float()
        out[name] = dict(r=m.r["default"], scale=m.scaling["default"], a=[a[0, 0].item(), a[-1, 0].item()], b=[b[0, -1].item(), b[-1, 0].item()])
    return out


def make(folder):
    for name, case in CASES.items():
        torch.manual_seed(len(name))
        dtype = case.pop("dtype", torch.float32)
        model = get_peft_model(base().to(dtype), LoraConfig(task_type="CAUSAL_LM", **case), autocast_adapter_dtype=False)
        for _, m in layers(model):
            torch.nn.init.normal_(m.lora_B["default"].weight)
        path = os.path.join(folder, name)
        model.save_pretrained(path)
        os.remove(os.path.join(path, "README.md"))
        config = os.path.join(path, "adapter_config.json")
        with open(config) as f:
            text = json.load(f)
        for key in "target_modules", "exclude_modules":
            if isinstance(text[key], list):
                text[key].sort()  # PEFT has sets
        with open(config, "w") as f:
            f.write(json.dumps(text, indent=2) + "\n")
        with open(os.path.join(folder, name + ".json"), "w") as f:
            json.dump(expected(model), f, indent=1)
            f.write("\n")


def check(folder):
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if not os.path.isdir(path):
            continue
        files = load_file(os.path.join(path, "adapter_model.safetensors"))
        model = PeftModel.from_pretrained(base(tiny=name.startswith("tiny")), path, autocast_adapter_dtype=False)
        count = 0
        for module, m in layers(model):
            for matrix, of in (("lora_A", m.lora_A), ("lora_B", m.lora_B)):
                mine = files["base_model.model." + module + "." + matrix + ".weight"]
                assert torch.equal(of["default"].weight.float(), mine), (name, module, matrix)
                count += 1
        assert count == len(files) > 0, (name, count, len(files))
        want = os.path.join(folder, name + ".json")
        if os.path.exists(want):
            with open(want) as f:
                assert json.load(f) == expected(model), name
        print(name, count, "tensors")


if __name__ == "__main__":
    {"make": make, "check": check}[sys.argv[1]](sys.argv[2])
