package docs

import (
	"encoding/json"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/posthorn/posthorn/dispatcher/jobs/notices"
	"github.com/posthorn/posthorn/test/check"
)

// docs/notices.md has exactly the events and fields of notices, and its example is a notice.
func TestNoticesAreDocumented(t *testing.T) {
	events, inCode, inPage := map[string]bool{}, map[string]bool{}, map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^\t\w+ += "([A-Z][a-z]+ [A-Za-z ]+)"$`).FindAllStringSubmatch(read(t, "dispatcher", "jobs",
		"notices", "facts.go"), -1) {
		events[m[1]], inCode[m[1]] = true, true
	}
	for f := range reflect.TypeFor[notices.Properties]().Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		inCode[name] = true
	}
	for name := range rows(section(t, "notices.md", "Events")) {
		if name != "event" {
			inPage[name] = true
		}
	}
	differ(t, "docs/notices.md", inPage, inCode)

	examples := 0
	for _, b := range blocks(t, "json") {
		if b.Page != filepath.Join("docs", "notices.md") {
			continue
		}
		examples++
		var body struct {
			Event      string
			Properties json.RawMessage
		}
		check.NoError(t, "decode the example", json.Unmarshal([]byte(b.Text), &body))
		check.Equal(t, "the event of the example exists", events[body.Event], true)
		d := json.NewDecoder(strings.NewReader(string(body.Properties)))
		d.DisallowUnknownFields()
		check.NoError(t, "decode the properties of the example", d.Decode(&notices.Properties{}))
	}
	check.Equal(t, "examples", examples, 1)
}
