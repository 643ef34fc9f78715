"""`linnet info`: networks, saved files and runs."""

from __future__ import annotations

from tests.support.command_cases import diabetes, done, refused


def test_info(tmp_path, nets, made):
    train, _ = diabetes(tmp_path)
    said = done("info", "--model", f"{nets}:numbers")
    assert "37 parameters, 37 of them selected" in said and "blocks that --top counts, from bottom to top: 0" in said
    said = done("info", "--model", f"{nets}:numbers", "--data", train, "--target", "y", "--params", "2.*")
    assert "7 of them selected" in said and "Jacobian (60 x 7)" in said
    assert "--top needs --data" in refused("info", "--model", f"{nets}:numbers", "--top", 0)
    out = made / "run"
    said = done("info", out)
    for part in ("linnet adapt, regression", "columns: age, bmi, bp, s5", "command: ", "TangentRegressor"):
        assert part in said
    said = done("info", out / "adapter.safetensors")
    assert "posterior: " in said and "posterior.delta" in said
    assert "needs a saved file, a run folder, or --model" in refused("info")
    assert "need --model" in refused("info", out, "--data", train)
    (tmp_path / "x.safetensors").write_bytes(b"nothing")
    assert "not a complete safetensors file" in refused("info", tmp_path / "x.safetensors")
    assert "does not exist" in refused("info", tmp_path / "none.safetensors")
