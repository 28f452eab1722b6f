"""ATS against Pillow: exact on levels, close where Pillow rounds or takes the nearest pixel; and its policies."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.types import Batch, Domain
from gradveil.defences import Ats, parse
from gradveil.defences import ats as pixels
from gradveil.defences.ats import KINDS, TRANSFORMS, Numbered
from gradveil.spaces import ImageSpace

LEVELS = {
    "dark": torch.randint(3, 90, (3, 20, 24), generator=Key(0).generator()),
    "few": torch.randint(0, 3, (3, 20, 24), generator=Key(1).generator()) * 100,
    "whole": torch.randint(0, 256, (3, 20, 24), generator=Key(2).generator()),
    "flat": torch.full((3, 20, 24), 77),
}


def smooth() -> torch.Tensor:
    y, x = torch.meshgrid(torch.linspace(0, 3, 20), torch.linspace(0, 2, 24), indexing="ij")
    return torch.stack([(x + y).sin(), (x - y).cos(), (x * y).sin()]).mul(100).add(128).round()


def picture(levels: torch.Tensor) -> Image.Image:
    return Image.fromarray(levels.permute(1, 2, 0).to(torch.uint8).numpy())


def back(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).double()


def made(operation, levels: torch.Tensor, strength: float, dtype=torch.float32) -> torch.Tensor:
    u = levels.to(dtype) / 255
    return 255 * operation(u[None], torch.tensor([strength], dtype=dtype))[0].double()


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operations_on_levels_are_exact(name: str, dtype: torch.dtype):
    levels, image = LEVELS[name], picture(LEVELS[name])
    pairs = [
        (pixels.autocontrast, 0, ImageOps.autocontrast(image)),
        (pixels.equalize, 0, ImageOps.equalize(image)),
        (pixels.invert, 0, ImageOps.invert(image)),
        *((pixels.posterize, bits, ImageOps.posterize(image, bits)) for bits in (4, 6, 8)),
        *((pixels.solarize, limit, ImageOps.solarize(image, limit)) for limit in (0, 50, 128, 256)),
    ]
    for operation, strength, expected in pairs:
        found = made(operation, levels, strength, dtype)
        assert torch.equal(found.round(), back(expected)), (operation, strength)
        assert float((found - found.round()).abs().max()) < 1e-4


@pytest.mark.parametrize("strength", [-0.5, -0.2, 0.3, 0.5])
def test_blends_are_pillows_but_for_rounding(strength: float):
    for levels in LEVELS.values():
        image = picture(levels)
        for operation, enhance in (
            (pixels.colour, ImageEnhance.Color),
            (pixels.contrast, ImageEnhance.Contrast),
            (pixels.brightness, ImageEnhance.Brightness),
            (pixels.sharpness, ImageEnhance.Sharpness),
        ):
            expected = back(enhance(image).enhance(1 + strength))
            assert float((made(operation, levels, strength) - expected).abs().max()) <= 2, operation


def affine(*numbers: float) -> Image.Image:
    return picture(smooth()).transform((24, 20), Image.Transform.AFFINE, numbers, Image.Resampling.BILINEAR)


@pytest.mark.parametrize("m", [-0.3, 0.2])
def test_geometry_is_pillows_away_from_the_border(m: float):
    cases = [
        (pixels.shear_x, m, affine(1, m, 0, 0, 1, 0)),
        (pixels.shear_y, m, affine(1, 0, 0, m, 1, 0)),
        (pixels.translate_x, m, affine(1, 0, m * 24, 0, 1, 0)),
        (pixels.translate_y, m, affine(1, 0, 0, 0, 1, m * 20)),
        (pixels.rotate, 70 * m, picture(smooth()).rotate(70 * m, Image.Resampling.BILINEAR)),
    ]
    for operation, strength, image in cases:
        found, expected = made(operation, smooth(), strength), back(image)
        inside = torch.nn.functional.max_pool2d((expected == 0).double(), 5, 1, 2) == 0
        assert 0.3 < float(inside[:, 3:-3, 3:-3].double().mean()) < 1, operation
        off = (found - expected).abs()[:, 3:-3, 3:-3][inside[:, 3:-3, 3:-3]]
        assert float(off.max()) < 2.5, operation


def test_what_is_shifted_out_is_black_and_what_is_turned_out_is_grey():
    assert float(made(pixels.translate_x, smooth(), 0.5)[:, :, -5:].abs().max()) == 0
    assert made(pixels.rotate, smooth(), 30)[:, 0, 0].tolist() == pytest.approx([128] * 3, abs=1e-3)


def test_numbers_are_the_authors():
    kinds = {kind: name for name, kind in KINDS.items()}
    named = [(kinds[each.kind], each.level) for each in TRANSFORMS]
    assert len(named) == 50
    facts = {1: ("contrast", 6), 3: ("translateX", 9), 7: ("translateY", 2), 18: ("contrast", 7), 43: ("translateY", 3)}
    assert {number: named[number] for number in facts} == facts
    assert KINDS["translateX"].at(9) == pytest.approx(150 / 331)
    assert [round(KINDS["posterize"].at(level)) for level in (0, 7, 9)] == [8, 5, 4]


def test_all_transforms_run_differentiate_and_stay_within_the_bounds():
    u = torch.rand(2, 3, 12, 12, generator=Key(3).generator(), dtype=torch.float64).requires_grad_()
    for number, each in enumerate(TRANSFORMS):
        out = each(u, torch.ones(2, dtype=torch.float64) if each.kind.signed else None)
        assert out.shape == u.shape
        assert bool((out >= -1e-12).all() and (out <= 1 + 1e-12).all())
        (slope,) = torch.autograd.grad(out.sum(), u)
        assert bool(torch.isfinite(slope).all()), number
        alone = torch.vmap(lambda one, each=each: each(one[None], _sign(each, one))[0])(u)
        torch.testing.assert_close(alone, out, msg=f"transform {number}")


def _sign(each: Numbered, one: torch.Tensor) -> torch.Tensor | None:
    return one.new_ones(1) if each.kind.signed else None


def examples(count: int = 6) -> tuple[Batch, Domain]:
    lower, upper = torch.tensor([[[-1.0]], [[-3.0]], [[0.0]]]), torch.tensor([[[2.0]], [[1.0]], [[5.0]]])
    u = torch.rand(count, 3, 12, 12, generator=Key(4).generator())
    return Batch(lower + (upper - lower) * u, torch.zeros(count, dtype=torch.long)), Domain(
        ImageSpace.between(lower, upper, (3, 12, 12)), 2
    )


def test_a_policy_is_its_transforms_in_a_row_in_the_data_own_space():
    batch, domain = examples()
    ats = Ats("3-9-1")
    noise = ats.noise(batch).sample(Key(0))
    lower, upper = domain.space.bounds(batch.inputs)
    u = (batch.inputs - lower) / (upper - lower)
    shifted = TRANSFORMS[3](u, noise["sign"][:, 0])
    expected = TRANSFORMS[1](TRANSFORMS[9](shifted, None), noise["sign"][:, 1])
    found = ats.apply(batch, noise, domain)
    torch.testing.assert_close(found.inputs, lower + (upper - lower) * expected)
    assert found.targets is batch.targets


def test_the_hybrid_takes_one_policy_for_each_image():
    batch, domain = examples(8)
    noise = Ats().noise(batch).sample(Key(1))
    first, second = noise["sign"].split(3, 1)
    views = [Ats("3-1-7").apply(batch, {"sign": first}, domain), Ats("43-18-18").apply(batch, {"sign": second}, domain)]
    found = Ats().apply(batch, noise, domain).inputs
    chosen = noise["choice"].argmax(1)
    assert set(chosen.tolist()) == {0, 1}
    for image, which in enumerate(chosen.tolist()):
        torch.testing.assert_close(found[image], views[which].inputs[image], rtol=0, atol=0)


def test_only_what_is_drawn_is_declared():
    batch, _ = examples()
    assert not Ats("0-8-9").noise(batch)
    assert set(Ats("3").noise(batch)) == {"sign"}
    assert Ats("0+3-1-7").noise(batch)["sign"].shape == (6, 3)


@pytest.mark.parametrize("policy", ["", "3-", "a", "3-1-50", "3+ 4"])
def test_policies_that_cannot_be_read_are_refused(policy: str):
    with pytest.raises(GradveilError, match=r"ats\.policy"):
        Ats(policy)


def test_its_text_is_read_again():
    text = parse('ats(policy="43-18-18") + dp').name
    assert parse(text).name == text == 'ats(policy="43-18-18") + dp'
    assert parse('ats(policy="3-1-7+43-18-18")').name == "ats"
