"""Arithmetic word tasks with a calculator."""

from agentrl_envs.calculator.env import Calculator

__all__ = ["Calculator"]
