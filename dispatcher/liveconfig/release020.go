package liveconfig

import (
	"bytes"
	"encoding/json"
)

// During an upgrade from release 0.2.0, a new dispatcher starts with live configs of the old
// operator, and a new operator writes live configs for old dispatchers. That release has other names for
// some fields. This file and its test can be removed with the support of such upgrades.

// marshalBeginning returns the JSON of a config without objects.
func marshalBeginning(c Config, names020 bool) ([]byte, error) {
	if names020 {
		return json.Marshal(struct {
			Version int    `json:"version"`
			Tenant  string `json:"tenant"`
		}{c.Version, c.Namespace})
	}
	return json.Marshal(Config{Version: c.Version, Namespace: c.Namespace})
}

// marshalDestination returns the JSON of a destination.
func marshalDestination(d Destination, names020 bool) ([]byte, error) {
	if !names020 || d.State != Paused {
		return json.Marshal(d)
	}
	old := struct {
		Destination
		State      string `json:"state"`
		HeldReason string `json:"heldReason,omitempty"`
	}{d, "Held", d.PausedReason}
	old.PausedReason = ""
	return json.Marshal(old)
}

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
