"""A chat template that shows tools in the syntax of Hermes, two tools, and a call."""

from __future__ import annotations

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{% if m.tool_call_id %} for {{ m.tool_call_id }}{% endif %}|{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if thinking is defined %}think={{ thinking }}{% endif %}{% endif %}"
)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "default": None}}}
TIME = {"function": {"description": "Tells the time.", "name": "time"}, "type": "function"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo \N{SNOWMAN}"}}\n</tool_call>'
