"""Networks in the runtimes that they ship with: qtrace's default beside float and each runtime's peer."""
