package adminapi

import (
	"encoding/json"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
)

var camelCase = regexp.MustCompile(`^[a-z][A-Za-z0-9]*$`)

// Every field that the admin API reads or writes has a name in camelCase.
func TestFieldsAreCamelCase(t *testing.T) {
	seen := map[reflect.Type]bool{}
	var check func(reflect.Type)
	check = func(of reflect.Type) {
		for of.Kind() == reflect.Pointer || of.Kind() == reflect.Slice || of.Kind() == reflect.Map {
			of = of.Elem()
		}
		if of.Kind() != reflect.Struct || seen[of] || of == reflect.TypeFor[time.Time]() ||
			reflect.PointerTo(of).Implements(reflect.TypeFor[json.Marshaler]()) {
			return
		}
		seen[of] = true
		for i := range of.NumField() {
			f := of.Field(i)
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			if !f.IsExported() {
				continue
			}
			if !f.Anonymous && !camelCase.MatchString(name) {
				t.Errorf("JSON name of %s.%s: got %q, want camelCase", of, f.Name, name)
			}
			check(f.Type)
		}
	}
	for _, v := range []any{Report{}, DeadLetter{}, DeadLetterAction{}, DeadLetterProgress{}, Attempt{}, LaneState{}, liveconfig.Config{}} {
		check(reflect.TypeOf(v))
	}
}

// The line of an attempt, as `posthorn attempts -o json` and scripts read it.
func TestAttemptInJSON(t *testing.T) {
	got, err := json.Marshal(Attempt{
		Time: time.Unix(0, 0).UTC(), Duration: time.Millisecond, Source: "shop/web", Destination: "shop/crm", Endpoint: "primary",
		Seq: 7, MessageID: "m-1", Number: 2, StatusCode: 500, Reason: "ServerError", Message: "no", RemoteAddr: "192.0.2.1:443", Probe: true,
	})
	const want = `{"time":"1970-01-01T00:00:00Z","durationNanos":1000000,"timing":{"dnsNanos":0,"connectNanos":0,"tlsNanos":0,"firstByteNanos":0,"totalNanos":0},` +
		`"source":"shop/web","destination":"shop/crm","endpoint":"primary","seq":7,"messageId":"m-1","number":2,"statusCode":500,"reason":"ServerError","message":"no","remoteAddr":"192.0.2.1:443","probe":true}`
	if err != nil || string(got) != want {
		t.Errorf("got  %s (%v)\nwant %s", got, err, want)
	}
}
