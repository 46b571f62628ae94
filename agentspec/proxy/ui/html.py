"""A run as one file that any browser shows without a server: the page's own modules, put into one script."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("page")

MODULES = ("dom.js", "tokens.js", "run.js")
"""What the view of a run is made of, each after what it imports. No two of them may declare the same name."""
_START = 'document.querySelector("main").append(runView(JSON.parse(document.getElementById("run").textContent)));'


def one_file(run: Mapping[str, Any]) -> str:
    """The view of `run`, as the route /ui/data/run describes it. Its policy allows this script and style alone."""
    modules = "\n".join((PAGE / name).read_text() for name in MODULES)
    script = re.sub(r"^import [^;]*;\n|^export ", "", modules, flags=re.M) + _START
    style = (PAGE / "style.css").read_text()
    data = json.dumps(run, ensure_ascii=True).replace("<", "\\u003c")  # or text could end the element
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="content-security-policy" content="{policy}; require-trusted-types-for 'script'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>A run of agentspec</title>
<style>{style}</style>
</head>
<body>
<main></main>
<script type="application/json" id="run">{data}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
