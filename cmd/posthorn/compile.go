package main

import (
	"fmt"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/posthorn/posthorn/controllers/standalone"
	"github.com/posthorn/posthorn/dispatcher/egress"
)

func newCompile() *cobra.Command {
	var dir, output string
	var allow []string
	cmd := &cobra.Command{
		Use:   "compile -f DIR",
		Short: "Check manifests offline: print the config they compile to, and their conditions",
		Long: `Validates and compiles a folder (or file) of manifests exactly as the API server and
the operator would, and prints per namespace the live config (secrets redacted)
and the condition of each object. Nothing is run and nothing is sent.

Exits 0 when every object is accepted, 1 when one is not or a file has mistakes.`,
		Example: `  posthorn compile -f ./webhooks
  posthorn compile -f ./webhooks -o json | jq .problems`,
		Args: exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if dir == "" {
				return usagef("the folder of manifests is missing; set -f DIR")
			}
			policy, err := egress.ParsePolicy(allow)
			if err != nil {
				return usagef("--egress-allow: %v", err)
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
				return errSilent
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVarP(&dir, "file", "f", "", "folder or file of manifests")
	outputFlag(cmd, &output, "yaml", "yaml or json", "yaml", "json")
	f.StringSliceVar(&allow, "egress-allow", nil, "addresses that may be delivered to besides public ones, as for posthorn run")
	return cmd
}
