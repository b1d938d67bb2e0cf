package event

import (
	"strconv"
	"testing"
	"time"
)

func TestReadTime(t *testing.T) {
	const missing = ""
	tests := []struct{ in, want string }{
		{`"2009-11-10T23:00:00.000Z"`, "2009-11-10T23:00:00.000Z"},
		{`"2009-11-10T23:00:00Z"`, "2009-11-10T23:00:00.000Z"},
		{`"2009-11-10T23:00:00+0000"`, "2009-11-10T23:00:00.000Z"}, // the vendor's Go client, version 2
		{`"2009-11-10T23:00:00-0700"`, "2009-11-11T06:00:00.000Z"},
		{`"2009-11-10T23:00:00.5+05:30"`, "2009-11-10T17:30:00.500Z"},
		{`"2009-11-10T23:00:00+02"`, "2009-11-10T21:00:00.000Z"},
		{`"2009-11-10T23:00:00.123456789Z"`, "2009-11-10T23:00:00.123Z"},
		{`"2009-11-10T23:00:00.999999+00:00"`, "2009-11-10T23:00:00.999Z"},
		{`"2009-11-10T23:00:00,25Z"`, "2009-11-10T23:00:00.250Z"},
		{`"2009-11-10T23:00:00"`, "2009-11-10T23:00:00.000Z"},
		{`"2009-11-10T23:00"`, "2009-11-10T23:00:00.000Z"},
		{`"2009-11-10T23:00Z"`, "2009-11-10T23:00:00.000Z"},
		{`"2009-11-10"`, "2009-11-10T00:00:00.000Z"},
		{`"2009-11-10 23:00:00"`, "2009-11-10T23:00:00.000Z"},
		{`"2009-11-10 23:00:00 +0100"`, "2009-11-10T22:00:00.000Z"},
		{`"2009-11-10 23:00:00 UTC"`, "2009-11-10T23:00:00.000Z"},
		{`"2009-11-10t23:00:00z"`, "2009-11-10T23:00:00.000Z"},
		{`"2016-12-31T23:59:60Z"`, "2017-01-01T00:00:00.000Z"},
		{`"2024-02-29T00:00:00Z"`, "2024-02-29T00:00:00.000Z"},
		{`"1969-12-31T23:59:59.999Z"`, "1969-12-31T23:59:59.999Z"},
		{`"0000-01-01T00:00:00Z"`, "0000-01-01T00:00:00.000Z"},
		{`"9999-12-31T23:59:59.999Z"`, "9999-12-31T23:59:59.999Z"},
		{`1257894000`, "2009-11-10T23:00:00.000Z"},
		{`1257894000.5`, "2009-11-10T23:00:00.500Z"},
		{`1257894000123`, "2009-11-10T23:00:00.123Z"},

		{``, missing}, {`null`, missing}, {`""`, missing}, {`"now"`, missing}, {`true`, missing}, {`{}`, missing}, {`["2009-11-10"]`, missing},
		{`0`, missing}, {`-1`, missing}, {`1e300`, missing}, {`1257894000123456`, missing},
		{`"0001-01-01T00:00:00Z"`, missing}, // an unset time
		{`"2009-13-10T23:00:00Z"`, missing}, {`"2009-00-10T23:00:00Z"`, missing}, {`"2009-11-31T23:00:00Z"`, missing},
		{`"2009-02-29T23:00:00Z"`, missing}, {`"2009-11-00T23:00:00Z"`, missing},
		{`"2009-11-10T24:00:00Z"`, missing}, {`"2009-11-10T23:60:00Z"`, missing}, {`"2009-11-10T23:00:61Z"`, missing},
		{`"2009-11-10T23:00:00.Z"`, missing}, {`"2009-11-10T23:00:00+1"`, missing}, {`"2009-11-10T23:00:00+24:00"`, missing},
		{`"2009-11-10T23:00:00+00:60"`, missing}, {`"2009-11-10T23:00:00+00:0"`, missing}, {`"2009-11-10T23:00:00ZZ"`, missing},
		{`"2009-11-10T23:00:00 "`, missing}, {`" 2009-11-10T23:00:00"`, missing}, {`"2009-11-10T"`, missing}, {`"2009-11-10T23"`, missing},
		{`"2009-11-10x23:00:00"`, missing}, {`"2009/11/10"`, missing}, {`"09-11-10"`, missing}, {`"2009-1-1"`, missing}, {`"2009"`, missing},
		{`"+02009-11-10T23:00:00Z"`, missing}, {`"1257894000"`, missing}, {`"Tue Nov 10 2009"`, missing},
		{`"0000-01-01T00:00:00+01:00"`, missing}, {`"9999-12-31T23:59:59-01:00"`, missing},
		{`"２００９-11-10"`, missing},
	}
	for _, tt := range tests {
		got := missing
		if i := readTime([]byte(tt.in)); i.ok {
			got = string(appendMillis(nil, i.ms))
		}
		if got != tt.want {
			t.Errorf("readTime(%s): got %q, want %q", tt.in, got, tt.want)
		}
	}
}

// TestReadTimeAsTheLibrary compares the result with the standard library's parser.
func TestReadTimeAsTheLibrary(t *testing.T) {
	for at := time.Date(1, 1, 1, 1, 2, 3, 4_000_000, time.UTC); at.Year() < 9999; at = at.Add(3456789*time.Second + 7654321*time.Nanosecond) {
		local := at.In(time.FixedZone("", at.Second()*1800-15*3600))
		for _, layout := range []string{time.RFC3339Nano, "2006-01-02T15:04:05.000-0700", "2006-01-02 15:04:05.999999Z07:00"} {
			text := local.Format(layout)
			want, err := time.Parse(layout, text)
			if err != nil {
				t.Fatal(err)
			}
			got := parseTime([]byte(text))
			if !got.ok || got.ms != want.UnixMilli() {
				t.Fatalf("parseTime(%s): got %v, want %d", text, got, want.UnixMilli())
			}
			out := string(appendMillis(nil, got.ms))
			if back, err := time.Parse(time.RFC3339, out); err != nil || back.UnixMilli() != got.ms {
				t.Fatalf("appendMillis of %s: got %s, want the same time", text, out)
			}
		}
	}
}

func TestTimestamps(t *testing.T) {
	tests := []struct {
		name                                 string
		timestamp, original, sentAt, batchAt string // JSON values; an empty one is not sent
		want, wantOriginal                   string // for a receipt at 2026-05-04T12:00:00.123Z
	}{
		{"nothing", "", "", "", "", "2026-05-04T12:00:00.123Z", ""},
		{"only sentAt", "", "", `"2026-05-04T11:00:00Z"`, "", "2026-05-04T12:00:00.123Z", ""},
		{"only timestamp", `"2015-01-02T03:04:05.678Z"`, "", "", "", "2015-01-02T03:04:05.678Z", `"2015-01-02T03:04:05.678Z"`},
		{"a correct clock", `"2026-05-04T11:59:00.000Z"`, "", `"2026-05-04T12:00:00.000Z"`, "", "2026-05-04T11:59:00.123Z", `"2026-05-04T11:59:00.000Z"`},
		{"a clock an hour late", `"2026-05-04T10:59:58.001Z"`, "", `"2026-05-04T11:00:00.000Z"`, "", "2026-05-04T11:59:58.124Z", `"2026-05-04T10:59:58.001Z"`},
		{"a clock a year early", `"2027-05-04T12:00:00Z"`, "", `"2027-05-04T12:00:05Z"`, "", "2026-05-04T11:59:55.123Z", `"2027-05-04T12:00:00Z"`},
		{"an unset clock", `"1970-01-01T00:00:10Z"`, "", `"1970-01-01T00:00:20Z"`, "", "2026-05-04T11:59:50.123Z", `"1970-01-01T00:00:10Z"`},
		{"the clock was set in between", `"1970-01-01T00:00:10Z"`, "", `"2026-05-04T12:00:00Z"`, "", "1970-01-01T00:00:10.123Z", `"1970-01-01T00:00:10Z"`},
		{"historical data", `"1999-12-31T23:59:59Z"`, "", `"2026-05-04T12:00:00Z"`, "", "1999-12-31T23:59:59.123Z", `"1999-12-31T23:59:59Z"`},
		{"finer than milliseconds", `"2026-05-04T11:59:00.0009Z"`, "", `"2026-05-04T12:00:00.0011Z"`, "", "2026-05-04T11:59:00.122Z", `"2026-05-04T11:59:00.0009Z"`},
		{"offsets", `"2026-05-04T04:59:00-0700"`, "", `"2026-05-04T14:00:00+02:00"`, "", "2026-05-04T11:59:00.123Z", `"2026-05-04T04:59:00-0700"`},
		{"seconds since 1970", `1777895940`, "", `1777896000000`, "", "2026-05-04T11:59:00.123Z", `1777895940`},
		{"slightly in the future", `"2026-05-04T13:00:00Z"`, "", `"2026-05-04T12:00:00Z"`, "", "2026-05-04T13:00:00.123Z", `"2026-05-04T13:00:00Z"`},
		{"a day in the future", `"2026-05-05T12:00:00Z"`, "", `"2026-05-04T12:00:00Z"`, "", "2026-05-05T12:00:00.123Z", `"2026-05-05T12:00:00Z"`},
		{"far in the future", `"2030-01-01T00:00:00Z"`, "", `"2026-05-04T12:00:00Z"`, "", "2030-01-01T00:00:00.000Z", `"2030-01-01T00:00:00Z"`},
		{"sent by an unset clock", `"2026-05-04T11:00:00Z"`, "", `"1970-01-01T00:00:00Z"`, "", "2026-05-04T11:00:00.000Z", `"2026-05-04T11:00:00Z"`},
		{"sentAt is unset", `"2026-05-04T11:00:00Z"`, "", `"0001-01-01T00:00:00Z"`, "", "2026-05-04T11:00:00.000Z", `"2026-05-04T11:00:00Z"`},
		{"sentAt is unreadable", `"2026-05-04T11:00:00Z"`, "", `"yesterday"`, "", "2026-05-04T11:00:00.000Z", `"2026-05-04T11:00:00Z"`},
		{"timestamp is unreadable", `"yesterday"`, "", `"2026-05-04T12:00:00Z"`, "", "2026-05-04T12:00:00.123Z", `"yesterday"`},
		{"timestamp is an object", `{"a":1}`, "", `"2026-05-04T12:00:00Z"`, "", "2026-05-04T12:00:00.123Z", `{"a":1}`},
		{"timestamp is unset", `"0001-01-01T00:00:00Z"`, "", `"2026-05-04T12:00:00Z"`, "", "2026-05-04T12:00:00.123Z", `"0001-01-01T00:00:00Z"`},
		{"timestamp is null", `null`, "", "", "", "2026-05-04T12:00:00.123Z", ""},
		{"timestamp is empty", `""`, "", "", "", "2026-05-04T12:00:00.123Z", ""},
		{"originalTimestamp for timestamp", "", `"2026-05-04T11:59:00Z"`, `"2026-05-04T12:00:00Z"`, "", "2026-05-04T11:59:00.123Z", `"2026-05-04T11:59:00Z"`},
		{"originalTimestamp for null", `null`, `"2026-05-04T11:59:00Z"`, `"2026-05-04T12:00:00Z"`, "", "2026-05-04T11:59:00.123Z", `"2026-05-04T11:59:00Z"`},
		{"timestamp takes precedence", `"2026-05-04T11:58:00Z"`, `"2026-05-04T11:59:00Z"`, `"2026-05-04T12:00:00Z"`, "", "2026-05-04T11:58:00.123Z", `"2026-05-04T11:58:00Z"`},
		{"the first year", `"0000-01-01T00:00:00Z"`, "", `"2026-05-04T12:00:30Z"`, "", "0000-01-01T00:00:00.000Z", `"0000-01-01T00:00:00Z"`},
		{"the last year", `"9999-12-31T23:59:59.999Z"`, "", `"9999-12-31T23:59:59Z"`, "", "2026-05-04T12:00:01.122Z", `"9999-12-31T23:59:59.999Z"`},
		{"the batch's sentAt", `"2026-05-04T10:00:00Z"`, "", "", `"2026-05-04T11:00:00Z"`, "2026-05-04T11:00:00.123Z", `"2026-05-04T10:00:00Z"`},
		{"the call's sentAt takes precedence", `"2026-05-04T10:00:00Z"`, "", `"2026-05-04T10:00:01Z"`, `"2026-05-04T11:00:00Z"`, "2026-05-04T11:59:59.123Z", `"2026-05-04T10:00:00Z"`},
		{"an empty sentAt of the call does not take precedence", `"2026-05-04T10:00:00Z"`, "", `""`, `"2026-05-04T11:00:00Z"`, "2026-05-04T11:00:00.123Z", `"2026-05-04T10:00:00Z"`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			in := `{"batch":[{"type":"page","userId":"u"`
			for _, m := range [][2]string{{"timestamp", tt.timestamp}, {"originalTimestamp", tt.original}, {"sentAt", tt.sentAt}} {
				if m[1] != "" {
					in += "," + strconv.Quote(m[0]) + ":" + m[1]
				}
			}
			in += `}]`
			if tt.batchAt != "" {
				in += `,"sentAt":` + tt.batchAt
			}
			b, err := request("").Parse([]byte(in + `}`))
			if err != nil {
				t.Fatal(err)
			}
			c := b.Calls[0]
			m := members(t, c.Body)
			if string(m["timestamp"]) != strconv.Quote(tt.want) || c.Timestamp.Format("2006-01-02T15:04:05.000Z07:00") != tt.want || string(m["originalTimestamp"]) != tt.wantOriginal {
				t.Errorf("times: got timestamp %s (%v) and originalTimestamp %s, want %s and %s", m["timestamp"], c.Timestamp, m["originalTimestamp"], tt.want, tt.wantOriginal)
			}
		})
	}
}
