package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/contract/liveconfig/expression"
	"github.com/posthorn/posthorn/controllers/manifest"
	"github.com/posthorn/posthorn/controllers/standalone"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/internal/plural"
)

func newCompile() *cobra.Command {
	var dir, output string
	var allow, secrets []string
	var ceilings ceilingFlags
	cmd := &cobra.Command{
		Use:   "compile -f DIR",
		Short: "Check manifests offline, and print their compiled config",
		Long: `Validates and compiles a folder (or file) of manifests exactly as the API server and
the operator would, and prints the cost of each expression, each problem with file and line,
and a summary, to stderr. With -o it prints to stdout, per namespace, the live config (secrets
redacted) and the conditions of each object. It starts nothing and sends nothing.

Exits 0 if every object is accepted and its references resolve, 1 otherwise or if a file
has errors.`,
		Example: `  posthorn compile -f ./webhooks
  posthorn compile -f ./webhooks -o yaml
  posthorn compile -f ./webhooks -o json | jq .problems`,
		Args: command.ExactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if dir == "" {
				return command.Usagef("the manifests are missing; set -f DIR or -f FILE")
			}
			policy, err := egress.ParsePolicy(allow)
			if err != nil {
				return command.Usagef("--egress-allow: %v", err)
			}
			rules, err := ceilings.policy(policy)
			if err != nil {
				return err
			}
			values, err := standalone.ReadSecretValues(secrets)
			if err != nil {
				return command.Usagef("--secret: %v", err)
			}
			compiled, err := standalone.Compile(dir, values, rules)
			if err != nil {
				return err
			}
			if err := printCompiled(cmd.OutOrStdout(), output, compiled); err != nil {
				return err
			}
			printCosts(cmd.ErrOrStderr(), compiled)
			printVerdict(cmd.ErrOrStderr(), compiled)
			if !compiled.OK() {
				return command.ErrFailed
			}
			return nil
		},
	}
	f := cmd.Flags()
	command.ManifestsFlag(cmd, &dir, "folder or file of manifests")
	command.OutputFlag(cmd, &output, "", "print the compiled config: yaml or json", "yaml", "json")
	registerSecrets(cmd, &secrets)
	f.StringSliceVar(&allow, "egress-allow", nil, "non-public addresses that deliveries may use, as for posthorn run")
	ceilings.register(cmd)
	return cmd
}

// printCompiled prints the compiled config in a format; nothing if the format is empty.
func printCompiled(w io.Writer, format string, compiled standalone.Compiled) error {
	if format == "" {
		return nil
	}
	text, err := yaml.Marshal(compiled)
	if err != nil {
		return err
	}
	if format == "json" {
		if text, err = yaml.YAMLToJSON(text); err != nil {
			return err
		}
		text = append(text, '\n')
	}
	_, err = w.Write(text)
	return err
}

// printCosts prints the cost of each expression over calls.
func printCosts(w io.Writer, compiled standalone.Compiled) {
	for _, n := range compiled.Namespaces {
		for _, d := range n.Config.Destinations {
			line := func(field string, size expression.Size, most, limit uint64) {
				fmt.Fprintf(w, "%s/%s: spec.%s: %d nodes, patterns with %d instructions, %d units for long lists; an evaluation ends at %d\n",
					n.Namespace, d.Name, field, size.Nodes, size.Instructions, most, limit)
			}
			if f := d.Filter; f != nil && f.Expression != "" {
				if p, err := expression.Compile(f.Expression); err == nil {
					line("filter.expression", p.Size(), p.MostCost(), expression.MaxCost)
				}
			}
			if d.Request == nil {
				continue
			}
			texts := [][2]string{{"body", d.Request.Body}, {"path", d.Request.Path}, {"query", d.Request.Query}}
			for _, h := range d.Request.Headers {
				texts = append(texts, [2]string{"headers[" + h.Name + "]", h.Expression})
			}
			for _, x := range texts {
				if t, err := expression.CompileTransform(x[1]); err == nil {
					line("request."+x[0], t.Size(), t.MostCost(), expression.MaxTransformCost)
				}
			}
		}
	}
}

// printVerdict prints the problems of the manifests and a summary.
func printVerdict(w io.Writer, compiled standalone.Compiled) {
	for _, problems := range [][]manifest.Problem{compiled.Problems, compiled.NotAccepted, compiled.Warnings} {
		for _, p := range problems {
			fmt.Fprintln(w, p)
		}
	}
	notAccepted := map[string]bool{} // An object may have both conditions.
	for _, p := range compiled.NotAccepted {
		notAccepted[p.Object] = true
	}
	valid := plural.Count(compiled.Objects, "valid object")
	if n := len(notAccepted); n > 0 {
		valid += fmt.Sprintf(" (%d not accepted)", n)
	}
	counts := []string{valid}
	if n := len(compiled.Problems); n > 0 {
		counts = append(counts, plural.Count(n, "problem"))
	}
	if n := len(compiled.Warnings); n > 0 {
		counts = append(counts, plural.Count(n, "warning"))
	}
	fmt.Fprintln(w, strings.Join(counts, ", "))
}
