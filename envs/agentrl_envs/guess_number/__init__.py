"""Guess a number from "higher" and "lower"."""

from agentrl_envs.guess_number.env import GuessNumber

__all__ = ["GuessNumber"]
