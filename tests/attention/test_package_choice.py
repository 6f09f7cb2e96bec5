"""The choice of a backend where optional packages are installed, with modules that stand for them."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import pytest
import torch
from support.pretended_packages import AMPERE, BLACKWELL, HOPPER, INTERVALS, MLA, FlashModule, FlexModule, install
from torch.nn.attention import SDPBackend, sdpa_kernel

from cp_dtensor.attention.backends import packages, select
from cp_dtensor.attention.backends.cudnn_flex import CudnnFlexAttention
from cp_dtensor.attention.backends.flash4 import Flash4Attention
from cp_dtensor.attention.backends.select import choose_backend
from cp_dtensor.plan.partition import CallSpec
from cp_dtensor.plan.tiling import Masking
from cp_dtensor.spec.masks import Causal

Patch = pytest.MonkeyPatch


def chosen(spec: CallSpec) -> str:
    backend = choose_backend(spec)
    instead = f" or {type(backend.instead).__name__}" if isinstance(backend, Flash4Attention) else ""
    return type(backend).__name__ + instead


def test_packages_are_preferred_where_they_are_installed(fresh: Patch) -> None:
    install(fresh, FlashModule(), FlexModule())
    assert chosen(HOPPER) == chosen(BLACKWELL) == "Flash4Attention or CudnnAttention"
    assert chosen(INTERVALS) == "CudnnFlexAttention"
    assert chosen(AMPERE) == chosen(replace(HOPPER, capability=(12, 0))) == "FlashAttention"
    assert chosen(replace(INTERVALS, masking=Masking.INTERVALS_UNBROKEN)) == "IntervalAttention"
    assert chosen(replace(HOPPER, dtype="float32")) == "EfficientAttention"
    assert chosen(replace(HOPPER, head_dim=512, v_head_dim=512)) == "EfficientAttention"
    fresh.setattr(packages, "installed_version", lambda distribution: None)
    select._choose.cache_clear()
    assert (chosen(HOPPER), chosen(INTERVALS)) == ("CudnnAttention", "IntervalAttention")


@pytest.mark.parametrize(
    ("allowed", "shaped", "masked"),
    [
        ([SDPBackend.FLASH_ATTENTION], "Flash4Attention or FlashAttention", "IntervalAttention"),
        ([SDPBackend.CUDNN_ATTENTION], "CudnnAttention", "CudnnFlexAttention"),
        ([SDPBackend.MATH], "MathAttention", "IntervalAttention"),
        # The order is that of torch's kernels only. The second list is TorchTitan's.
        (
            [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], "Flash4Attention or EfficientAttention",
            "IntervalAttention",
        ),
        (
            [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
            "Flash4Attention or CudnnAttention", "CudnnFlexAttention",
        ),
        (
            [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
            "Flash4Attention or FlashAttention", "CudnnFlexAttention",
        ),
    ],
)  # fmt: skip
def test_sdpa_kernel_means_the_packages_too(
    fresh: Patch, allowed: list[SDPBackend], shaped: str, masked: str
) -> None:  # fmt: skip
    install(fresh, FlashModule(), FlexModule())
    with sdpa_kernel(allowed, set_priority=True):
        assert (chosen(HOPPER), chosen(INTERVALS)) == (shaped, masked)


def test_the_order_that_torch_sets_by_itself_is_not_the_users(fresh: Patch) -> None:
    """The first SDPA of a process on Hopper moves cuDNN to the front, which must not rule out the packages."""
    install(fresh, FlashModule(), FlexModule())
    names = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH", "OVERRIDEABLE")
    order = [SDPBackend.__members__[name].value for name in names]
    fresh.setattr(torch._C, "_get_sdp_priority_order", lambda: order)
    assert chosen(HOPPER) == "Flash4Attention or CudnnAttention"


def test_flash_alone_where_torch_has_none_for_two_head_dims_falls_back_to_our_kernels(fresh: Patch) -> None:
    install(fresh, FlashModule(), FlexModule())
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert chosen(MLA) == "Flash4Attention or IntervalAttention"


def test_an_implementation_that_the_user_has_activated_is_used(fresh: Patch) -> None:
    install(fresh, FlashModule(), FlexModule())
    for name, expected in ((None, "Flash4Attention"), ("FA4", "Flash4Attention"), ("FA3", "FlashAttention")):
        fresh.setattr(torch.nn.attention, "current_flash_attention_impl", lambda name=name: name)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            assert type(choose_backend(HOPPER)).__name__ == expected


def test_deterministic_calls_are_masked_by_shape_where_flash4_computes_them(fresh: Patch) -> None:
    install(fresh, FlashModule(), FlexModule())
    spec, allowed = replace(INTERVALS, mask=Causal(), deterministic=True), select.allowed_backends()
    shaped = select.masked_by_shape.__wrapped__(spec, allowed)
    assert shaped == replace(spec, masking=Masking.BY_SHAPE)
    backend = choose_backend(shaped)
    assert backend == Flash4Attention(select._WIDE_GRADIENTS, deterministic=True)
    assert choose_backend(spec) == CudnnFlexAttention(has_gradients=False)
    for other in (replace(spec, capability=(8, 0)), replace(spec, masking=Masking.INTERVALS_UNBROKEN)):
        assert select.masked_by_shape.__wrapped__(other, allowed) == other
    assert select.masked_by_shape.__wrapped__(spec, allowed._replace(torch_flash=True)) == spec


def test_missing_packages_are_logged_once_on_gpus_that_they_serve(
    fresh: Patch, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    install(fresh, FlashModule(), FlexModule())
    fresh.setattr(packages, "installed_version", lambda distribution: None)
    with caplog.at_level(logging.INFO, "cp_dtensor"):
        for spec in (AMPERE, replace(HOPPER, dtype="float32"), HOPPER, HOPPER, INTERVALS):
            choose_backend(spec)
    (record,) = (each for each in caplog.records if each.levelno == logging.WARNING)
    assert re.fullmatch(
        "flash-attn-4 and nvidia-cudnn-frontend .*pip install '..kernels.' in a clone of cp_dtensor",
        record.getMessage(),
    )


def test_a_log_says_which_kernel_computes_and_what_would_be_faster(
    fresh: Patch, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    install(fresh, FlashModule(), FlexModule())
    with caplog.at_level(logging.INFO, "cp_dtensor"):
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            choose_backend(HOPPER)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            choose_backend(HOPPER)
            choose_backend(AMPERE)
    fast, cudnn, other = (each.getMessage() for each in caplog.records)
    assert fast.startswith("FLASH_ATTENTION_4 computes")
    assert re.match("CUDNN_ATTENTION computes .*; FlashAttention-4 is faster .* FLASH_ATTENTION$", cudnn)
    assert re.match("CUDNN_ATTENTION computes", other)
    assert "faster" not in fast + other


def test_what_packages_print_and_warn_is_dropped(capfd: pytest.CaptureFixture[str]) -> None:
    with packages.quiet():
        print("compiled")
        logging.getLogger("FlexAttentionFwd").warning("experimental")
        torch.jit.warnings.warn("deprecated", DeprecationWarning, stacklevel=1)  # type: ignore[attr-defined]
    assert "".join(capfd.readouterr()) == ""
    assert logging.root.manager.disable == logging.NOTSET
