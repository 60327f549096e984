"""Write random blocks of every GGUF type, and the values that the `gguf` package decodes.

pip install --target /tmp/gguf gguf
PYTHONPATH=/tmp/gguf python -m tools.gguf_blocks tests/weights/gguf_blocks.json
"""

import argparse
import base64
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.gguf.file import TYPES

ROWS, COLUMNS = 2, 256
SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
"""Places of the fp16 numbers in a block, which must be finite."""


def make_blocks(seed: int = 0) -> dict[str, dict[str, str]]:
    """Return the bytes and the values (fp32) of rows of each type, in base64."""
    import gguf

    random, found = np.random.default_rng(seed), {}
    for number, kind in TYPES.items():
        shape = (ROWS, COLUMNS // kind.block, kind.num_bytes)
        raw = random.integers(0, 256, shape, dtype=np.uint8)
        for place in SCALES.get(kind.name, ()):
            scales = random.normal(0, 0.1, shape[:2]).astype(np.float16)
            raw[:, :, place : place + 2] = scales[..., None].view(np.uint8)
        if not kind.is_quantized:
            values = random.normal(0, 1, (ROWS, COLUMNS)).astype(np.float32)
            raw = gguf.quantize(values, gguf.GGMLQuantizationType(number)).view(np.uint8)
        raw = raw.reshape(ROWS, -1)
        values = gguf.dequantize(raw, gguf.GGMLQuantizationType(number))
        assert np.isfinite(values).all()
        found[kind.name] = {"raw": _text(raw), "values": _text(values)}
    return found


def _text(array: Any) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    file: Path = parser.parse_args().file
    content = {
        "writer": f"gguf {version('gguf')}",
        "rows": ROWS,
        "columns": COLUMNS,
        "types": make_blocks(),
    }
    file.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
