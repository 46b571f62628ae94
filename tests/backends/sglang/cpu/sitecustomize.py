"""Lets torchvision be imported next to a torch for CPUs: in the usual package index it is for GPUs."""

import torch

for name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
