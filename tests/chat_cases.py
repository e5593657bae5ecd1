"""Conversations for the tests of templates and messages."""

CHAT = [
    {"role": "system", "content": "Sei höflich & <kurz>."},
    {"role": "user", "content": "  Wie spät? 世界 🫠\n"},
    {"role": "assistant", "content": 'Zwölf "Uhr".'},
    {"role": "user", "content": "Danke\t!"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "größe",
            "description": "Länge eines <Wortes> & 'mehr'",
            "parameters": {
                "type": "object",
                "properties": {"wort": {"type": "string"}},
                "required": ["wort"],
            },
        },
    }
]
CALLS = [
    {"role": "user", "content": "3 mal 4?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "mul", "arguments": {"a": 3, "b": "ä"}}}
        ],
    },
    {"role": "tool", "content": "12", "tool_call_id": "1"},
    {"role": "user", "content": "gut"},
]
USER = {"role": "user", "content": "hi"}
