"""Bridges between agentrl environments and other interfaces."""
