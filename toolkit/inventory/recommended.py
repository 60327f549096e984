"""Models on the hub to begin with, shown where a name is not one of the hub."""

from dataclasses import dataclass

from toolkit.hardware.devices import Device, find_device
from toolkit.units import GIB, size

BF16 = 2  # bytes of a parameter


@dataclass(frozen=True, slots=True)
class Recommended:
    """A chat model on the hub that tk runs."""

    name: str
    weights: int  # bytes in memory
    is_gated: bool = False  # the hub asks to accept its terms first

    def fits(self, device: Device) -> bool:
        """Return True if the device has memory for the weights, a step and a short context."""
        return 1.1 * self.weights + GIB <= device.free


MODELS = (
    Recommended("HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008 * BF16),
    Recommended("Qwen/Qwen3-0.6B", 596_049_920 * BF16),
    Recommended("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400 * BF16, is_gated=True),
    Recommended("meta-llama/Llama-3.2-3B-Instruct", 3_212_749_824 * BF16, is_gated=True),
    Recommended("Qwen/Qwen3-4B-Instruct-2507", 4_022_468_096 * BF16),
    # 4.25 bits for a parameter of the experts.
    Recommended("openai/gpt-oss-20b", 19_110_297_600 * 17 // 32 + 1_804_459_584 * BF16),
    Recommended("Qwen/Qwen3-8B", 8_190_735_360 * BF16),
    Recommended("Qwen/Qwen3-30B-A3B-Instruct-2507", 30_532_122_624 * BF16),
)


def advice(name: str) -> str:
    """Return what to do about a name that the hub does not have; empty if it has an owner."""
    if "/" in name:
        return ""
    device = find_device()
    width = max(len(model.name) for model in MODELS)
    rows = [
        f"  {model.name:{width}}  {size(model.weights):>10}  "
        + ("yes" if model.fits(device) else "no")
        + (", after its terms are accepted on the hub" if model.is_gated else "")
        for model in MODELS
    ]
    return (
        " Models to begin with, and whether they fit on "
        f"{device.name}, with {size(device.free)} free:\n\n"
        + "\n".join([f"  {'MODEL':{width}}  {'WEIGHTS':>10}  FITS", *rows])
    )
