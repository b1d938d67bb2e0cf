package main

import (
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/cmd/internal/cli"
)

var exampleFlag = regexp.MustCompile(` (--?[a-zA-Z][a-z-]*)`)

// Every command says in a line what it does, and how it is called, by examples of
// itself with flags that it has.
func TestHelp(t *testing.T) {
	seen := 0
	var walk func(root, c *cobra.Command, called string)
	walk = func(root, c *cobra.Command, called string) {
		if c.Short == "" && c != root || strings.HasSuffix(c.Short, ".") || len(c.Short) > 110 {
			t.Errorf("%s: the short help is %q", c.CommandPath(), c.Short)
		}
		for _, sub := range c.Commands() {
			if sub.Name() != "kubectl" { // walked as a root
				walk(root, sub, called)
			}
		}
		if c.HasSubCommands() {
			return
		}
		seen++
		if !strings.Contains(c.Example, called+" ") {
			t.Errorf("%s: no example", c.CommandPath())
		}
		for line := range strings.Lines(c.Example) {
			i := strings.LastIndex(line, " "+called+" ")
			if i < 0 {
				continue // the part before the commands
			}
			call, _, _ := strings.Cut(line[i+1+len(called):], " | ")
			if found, _, err := root.Find(strings.Fields(strings.SplitN(call, " -", 2)[0])); err != nil || found != c {
				t.Errorf("%s: %q is an example of %s (%v)", c.CommandPath(), line, found.CommandPath(), err)
			}
			for _, m := range exampleFlag.FindAllStringSubmatch(call, -1) {
				name := strings.TrimLeft(m[1], "-")
				if c.Flag(name) == nil && (len(name) != 1 || c.Flags().ShorthandLookup(name) == nil &&
					c.InheritedFlags().ShorthandLookup(name) == nil) {
					t.Errorf("%s: the example %q has the flag %s, which is none", c.CommandPath(), line, m[1])
				}
			}
		}
	}
	root, plugin := newRoot(), cli.NewPlugin()
	walk(root, root, "posthorn")
	walk(plugin, plugin, "kubectl posthorn")
	if seen < 25 {
		t.Errorf("only %d commands were found", seen)
	}
}
