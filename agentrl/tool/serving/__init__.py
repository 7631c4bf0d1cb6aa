"""Tools over HTTP and MCP: one process serves the tools of many runs."""
