"""The web console: pages for people, the same as JSON, and health checks. It needs the extra `web`.

`commandbus console` runs it. `create_console` makes an ASGI application that another one can mount. It reads
through a bus of its own with few connections, and takes nothing from the workers. Modules:

- `access`: who may look, who may act, and how a change is protected
- `attention`: what needs a person, as sentences
- `live`: one look at the fleet for all who watch
- `pages`, `actions`, `api`: what is served
- `rendering`: how values become HTML
"""
