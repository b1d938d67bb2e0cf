package main

import (
	"fmt"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/controllers/standalone"
	"github.com/posthorn/posthorn/dispatcher/egress"
)

func newCompile() *cobra.Command {
	var dir, output string
	var allow []string
	cmd := &cobra.Command{
		Use:   "compile -f DIR",
		Short: "Check manifests offline: print their compiled config and their conditions",
		Long: `Validates and compiles a folder (or file) of manifests exactly as the API server and
the operator would, and prints per namespace the live config (secrets redacted)
and the condition of each object. It starts nothing and sends nothing.

Exits 0 if every object is accepted and its references resolve, 1 otherwise or if a file
has errors.`,
		Example: `  posthorn compile -f ./webhooks
  posthorn compile -f ./webhooks -o json | jq .problems`,
		Args: command.ExactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if dir == "" {
				return command.Usagef("the folder of manifests is missing; set -f DIR")
			}
			policy, err := egress.ParsePolicy(allow)
			if err != nil {
				return command.Usagef("--egress-allow: %v", err)
			}
			compiled, err := standalone.Compile(dir, policy.CheckHost)
			if err != nil {
				return err
			}
			text, err := yaml.Marshal(compiled)
			if err != nil {
				return err
			}
			if output == "json" {
				if text, err = yaml.YAMLToJSON(text); err != nil {
					return err
				}
				text = append(text, '\n')
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%s", text)
			if !compiled.OK() {
				return command.ErrFailed
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVarP(&dir, "file", "f", "", "folder or file of manifests")
	command.OutputFlag(cmd, &output, "yaml", "yaml or json", "yaml", "json")
	f.StringSliceVar(&allow, "egress-allow", nil, "non-public addresses that deliveries may use, as for posthorn run")
	return cmd
}
