"""The default model as a Hugging Face folder in fp32, so that every server computes with the same weights.

Owns: one conversion, run by setup.sh: export.py FILE.gguf FOLDER. Must not know: the servers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import transformers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    where = {"pretrained_model_name_or_path": args.file.parent, "gguf_file": args.file.name}
    unpacked = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = unpacked.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # else it would not be saved
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(unpacked.state_dict())
    model.save_pretrained(args.folder)
    transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(args.folder)


if __name__ == "__main__":
    main()
