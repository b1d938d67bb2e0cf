package compat

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/posthorn/posthorn/test/wait"
)

// client is a program that sends calls and prints their results.
type client struct {
	name string
	// tls is true for a client that sends over https only.
	tls bool
	// firstAlone is true for a client whose first request has one call.
	firstAlone bool
	// need prepares the program, or skips the test.
	need     func(t *testing.T)
	showcase func(url string) []string
	// many sends n calls of all types in requests of about batch calls; nil if not supported.
	many func(url string, n, batch int) []string
}

var clients = []client{
	{
		name: "go", // gopkg.in/segmentio/analytics-go.v3
		need: func(t *testing.T) {
			needNode(t) // The receiver needs it.
			if err := built.goClient(); err != nil {
				t.Fatal(err)
			}
		},
		showcase: func(url string) []string {
			return []string{filepath.Join(built.dir, "goclient"), "-endpoint", url, "-write-key", key, "showcase"}
		},
		many: func(url string, n, batch int) []string {
			return []string{filepath.Join(built.dir, "goclient"), "-endpoint", url, "-write-key", key, "-calls", strconv.Itoa(n), "-batch",
				strconv.Itoa(batch), "many"}
		},
	},
	{
		name:     "node", // @segment/analytics-node
		need:     needNode,
		showcase: func(url string) []string { return []string{"node", "node/client.js", url, key, "showcase"} },
		many: func(url string, n, batch int) []string {
			return []string{"node", "node/client.js", url, key, "many", strconv.Itoa(n), strconv.Itoa(batch)}
		},
	},
	{
		name:     "browser", // @segment/analytics-next
		need:     needNode,
		showcase: func(url string) []string { return []string{"node", "node/browser.mjs", url, key, origin, "showcase"} },
		many: func(url string, n, batch int) []string {
			return []string{"node", "node/browser.mjs", url, key, origin, "many", strconv.Itoa(n), strconv.Itoa(batch)}
		},
	},
	{
		name:     "reactnative", // @segment/analytics-react-native
		tls:      true,
		need:     needNode,
		showcase: func(url string) []string { return []string{"node", "node/reactnative.js", url, key, "showcase"} },
		many: func(url string, n, batch int) []string {
			return []string{"node", "node/reactnative.js", url, key, "many", strconv.Itoa(n), strconv.Itoa(batch)}
		},
	},
	{
		name:       "rudder", // @rudderstack/rudder-sdk-node
		firstAlone: true,
		need:       needNode,
		showcase:   func(url string) []string { return []string{"node", "node/rudder.js", url, key, "showcase"} },
		many: func(url string, n, batch int) []string {
			return []string{"node", "node/rudder.js", url, key, "many", strconv.Itoa(n), strconv.Itoa(batch)}
		},
	},
	{
		name:     "page", // the requests of browsers: preflight, fetch and sendBeacon
		need:     needNode,
		showcase: func(url string) []string { return []string{"node", "node/page.js", url, key, origin} },
	},
}

// calls runs a client and returns the messageIds of its calls. The client must report each
// call as successful.
func calls(t *testing.T, w *wire, program []string) (ids []string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), wait.Limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, program[0], program[1:]...)
	cmd.Env = append(os.Environ(), "TZ=UTC", "NODE_EXTRA_CA_CERTS="+w.certificate(t)) // Clients send their time zone.
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.WaitDelay = time.Second
	if err := cmd.Run(); err != nil {
		t.Fatalf("client: got error %v, want none\n%s%s", err, stderr.Bytes(), stdout.Bytes())
	}
	for lines := json.NewDecoder(&stdout); lines.More(); {
		var r struct{ ID, Error string }
		if err := lines.Decode(&r); err != nil {
			t.Fatal(err)
		}
		if r.Error != "" {
			t.Errorf("result of call %s: got error %s, want none", r.ID, r.Error)
		}
		ids = append(ids, r.ID)
	}
	if len(ids) == 0 {
		t.Fatalf("calls of the client: got 0, want some\n%s", stderr.Bytes())
	}
	return ids
}
