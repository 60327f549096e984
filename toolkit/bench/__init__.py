"""Load generator: arrivals, prompts, client, statistics, report.

A run (`run.measure`) makes its complete schedule before it sends anything (`load.arrivals`). Each
client is one event loop, in this process or in its own (`load.processes`), and sends every n-th
request (`load.share`). It times bytes before it parses them, parses only events that differ from
the usual one in more than the text, and records times and counts only (`load.record`). All
statistics are pure functions of the records, computed afterwards (`report.stats`, `report.summary`,
`report.steady`). The table, JSON and HTML show them, and `report.compare` reads the JSON again."""
