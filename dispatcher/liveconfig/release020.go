package liveconfig

import (
	"bytes"
	"encoding/json"
)

// During an upgrade from release 0.2.0, a new dispatcher starts with live configs of the old
// operator. That release has other names for some fields. This file and its test can be removed with
// the support of such upgrades.

// withCurrentNames returns a live config with the present names. It returns a text that it cannot
// parse as it is: the strict decoder then reports the error.
func withCurrentNames(plain []byte) []byte {
	if !bytes.Contains(plain, []byte(`"tenant":`)) {
		return plain
	}
	var config map[string]json.RawMessage
	if json.Unmarshal(plain, &config) != nil || config["tenant"] == nil {
		return plain
	}
	rename(config, "tenant", "namespace")
	if config["destinations"] != nil {
		var destinations []map[string]json.RawMessage
		if json.Unmarshal(config["destinations"], &destinations) != nil {
			return plain
		}
		for _, d := range destinations {
			rename(d, "heldReason", "pausedReason")
			if string(d["state"]) == `"Held"` {
				d["state"] = json.RawMessage(`"` + Paused + `"`)
			}
		}
		renamed, err := json.Marshal(destinations)
		if err != nil {
			return plain
		}
		config["destinations"] = renamed
	}
	renamed, err := json.Marshal(config)
	if err != nil {
		return plain
	}
	return renamed
}

// rename renames a key. An object with both keys is not changed, so the decoder rejects it.
func rename(object map[string]json.RawMessage, from, to string) {
	if value, ok := object[from]; ok && object[to] == nil {
		delete(object, from)
		object[to] = value
	}
}
