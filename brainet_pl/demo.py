"""`make demo`: learn the structure of scikit-learn's digits, print it, and draw it."""

from __future__ import annotations

from pathlib import Path

from sklearn.datasets import load_digits

from brainet_pl.structure import learn_structure
from brainet_pl.structure.draw import draw_ggt, draw_network


def main(folder: str = "runs/demo") -> None:
    """Write two pictures and a JSON file into `folder`."""
    pixels = load_digits().data
    ggt = learn_structure(pixels, test="gaussian", threshold=0.1, max_order=2)
    print(ggt.summary())
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    names = [f"{i // 8},{i % 8}" for i in range(64)]
    draw_ggt(ggt).savefig(out / "structure.png", dpi=150)
    draw_network(ggt, ggt.map(), names=names).savefig(out / "network.png", dpi=150)
    (out / "structure.json").write_text(ggt.to_json())
    print(f"pictures and the tree as JSON: {out}")


if __name__ == "__main__":
    main()
