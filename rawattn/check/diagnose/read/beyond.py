"""Passes beyond the first order, asked such that they are forward passes: with tv alone as
direction tout, or ddout, is P tv, as out is P v."""

from dataclasses import replace

import numpy as np

from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.read import probe
from rawattn.check.diagnose.read.probe import Ask, Weights


def read_tangents(ask: Ask, question: Question) -> Weights:
    """The weights of tout. Raises Refused, as the others do."""

    def tangents(asked: Question) -> Answers:
        answers = ask(_moved(asked))
        return {"out": answers["tout"], "lse": answers["jvp lse"]}

    return probe.read_forward(tangents, question)


def read_first_pass(ask: Ask, question: Question) -> Weights:
    """The weights of ddout, which are made with the lse that is passed."""

    def tangents(asked: Question) -> Answers:
        _, given = probe.with_right(replace(asked, dout=np.zeros_like(asked.out)))
        return {"out": ask(_moved(given))["ddout"]}

    return replace(probe.read_forward(tangents, question), value_head=None)


def _moved(question: Question) -> Question:
    """In the direction of tv = v alone."""
    still = {"tq": np.zeros_like(question.q), "tk": np.zeros_like(question.k)}
    return replace(question, **still, tv=question.v)
